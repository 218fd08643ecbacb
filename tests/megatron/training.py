"""Trains small Megatron-Core models in any layout, for the tests of this folder. Runs inside ranks: on CPU ranks, or on
the GPU that the rank has chosen where there is one (test_gpu.py).

`train(case)` builds the model that `case` describes as a Megatron user would, takes a few steps through Megatron's own
schedule, DistributedDataParallel and optimizer, and returns the losses and gradient norms. The data depends on the data
rank alone, so a case and its unsharded twin (`case.unsharded()`) see the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import gtp.megatron
from gtp.testing.megatron_cpu import megatron_on_cpu
from tests.megatron import hybrid
from tests.megatron.models import SEQ, VOCAB, bare_models, model_config

BATCH = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One model in one layout. Ranks that tp, pp and gtp leave over are data parallel."""

    # layout
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    gtp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    egtp: int = 1
    sequence_parallel: bool = False
    # model
    layers: int = 2
    hidden: int = 32
    tied: bool = False
    gqa: bool = False
    mtp: int = 0
    experts: int = 0
    shared_expert: bool = False
    bias: bool = False
    recompute: str | None = None
    mla: bool = False
    hybrid: str | None = None  # layers of a HybridModel: M Mamba, * attention, - MLP
    bf16: bool = False
    cpu_init: bool = True
    te: bool = False  # Transformer Engine's layers, its grouped GEMM for experts; on GPUs
    # training
    optimizer: str = "adam"
    layer_wise: bool = False
    distributed_optimizer: bool = False
    overlap_grad: bool = False
    overlap_param: bool = False
    grad_fp32: bool = False
    per_token: bool = False
    microbatches: int = 1
    clip: float = 0.0
    steps: int = 5
    bucket_size: int | None = None
    alignment: int = 1
    transport: str = "auto"

    def unsharded(self) -> Case:
        """The same model and data in Megatron without gtp."""
        return dataclasses.replace(self, gtp=1, egtp=1)


@dataclasses.dataclass
class Trained:
    """What a rank saw.

    Attributes:
        losses: Per step, mean over all data ranks; NaN on ranks that are not the last pipeline stage.
        norms: Gradient norm of the whole model per step, before clipping.
        sharded: Names of the weights that gtp shards on this rank.
        hit_rate: Share of weight uses that found their weight gathered.
    """

    losses: list[float]
    norms: list[float]
    sharded: list[str]
    hit_rate: float
    extra: Any = None


def train(case: Case, probe: Callable[[Any], Any] | None = None) -> Trained:
    """Runs `case` on this rank. `probe(job)` is called after the last step; what it returns is `extra`."""
    with environment(case):
        job = Job(case)
        for step in range(case.steps):
            job.step(step)
        return job.result(probe(job) if probe is not None else None)


class Job:
    """A model, its optimizer and its data, on this rank, within `environment(case)`.

    Args:
        models: Bare models to train in place of new ones.
    """

    def __init__(self, case: Case, models: list[Any] | None = None) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.case = case
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.parallel = parallel_state
        self.config, self.chunks, self.optimizer = build(case, models)
        self.forward_backward = get_forward_backward_func()

    def step(self, number: int, update: bool = True) -> None:
        """Forward, backward, `finalize_model_grads`; with `update` the optimizer step. On the data of step `number`."""
        case = self.case
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [iter(self.batches(number)) for _ in self.chunks]
        losses = self.forward_backward(
            forward_step_func=partial(_forward_step, case),
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=case.microbatches,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
        if update:
            _, norm, _ = self.optimizer.step()
            self.norms.append(float(norm) if norm is not None else math.nan)
        self.losses.append(self._mean(losses))

    def batches(self, step: int) -> list[torch.Tensor]:
        """`[BATCH, SEQ + 1]` per microbatch, equal for equal step and data rank."""
        rank = self.parallel.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(1000 * step + rank)
        drawn = [torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator) for _ in range(self.case.microbatches)]
        return [ids.cuda() for ids in drawn]

    def result(self, extra: Any = None) -> Trained:
        weights = [
            (name, p)
            for chunk in self.chunks
            for name, p in chunk.module.named_parameters()
            if isinstance(p, gtp.megatron.MegatronGTPWeight)
        ]
        runtimes = gtp.megatron.runtimes_of(self.chunks)
        stats = [r.stats() for r in runtimes]
        hits, consumes = sum(s.prefetch_hits for s in stats), sum(s.consumes for s in stats)
        return Trained(self.losses, self.norms, [n for n, _ in weights], hits / max(consumes, 1), extra)

    def _mean(self, losses: list[Any]) -> float:
        if not losses:
            return math.nan
        local = torch.stack([torch.stack([t.double() for t in parts]) for parts in losses]).sum(0)
        group = self.parallel.get_data_parallel_group()
        dist.all_reduce(local, group=group)
        return float(local[0] / local[1])


def import_megatron() -> None:
    """What a rank imports once, and no garbage collection looks at again: half a million objects, a fifth of a second.

    On CPU ranks nothing of it is compiled: of its compiled functions these models call one, the router's addition of a
    bias that they do not have, and what it loads to compile them takes as long as Megatron itself.
    """
    if "megatron.core" in sys.modules:
        return
    eager = mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f))
    with contextlib.nullcontext() if torch.cuda.is_available() else eager:
        for name in ("optimizer", "models.gpt", "models.hybrid.hybrid_model", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{name}")
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def environment(case: Case) -> Iterator[None]:
    """Megatron's process groups for `case` are up and gtp is installed, on CPU ranks or GPUs."""
    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with contextlib.ExitStack() as on_cpu:
        if not torch.cuda.is_available():
            on_cpu.enter_context(megatron_on_cpu())
            on_cpu.enter_context(hybrid.without_kernels())
        initialize(case)
        gtp.megatron.install(gtp.GTPConfig(alignment=case.alignment, transport=case.transport))
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)  # rank processes live on
            gtp.megatron.uninstall()
            parallel_state.destroy_model_parallel()
            MTPLossLoggingHelper.tracker.clear()  # Megatron's own, sized by the first model that logs


def initialize(case: Case) -> None:
    """Megatron's process groups and random states for the layout of `case`."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    destroy_num_microbatches_calculator()
    with mock.patch.object(parallel_state, "create_group", _group):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
            gtp_remat_size=case.gtp,
            expert_gtp_remat_size=case.egtp,
            create_gloo_process_groups=False,
        )
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def _group(members: list[int] | None = None, *, ranks: Any = None, group_desc: str = "", **_: Any) -> Any:
    """In place of Megatron's `create_group`, which makes some fifty communicators per layout: those of the rank
    process, one per set of ranks, and one more for the GTP axis.
    """
    chosen = tuple(sorted(members or ranks or range(dist.get_world_size())))
    key = (chosen, "GTP" in group_desc)
    if key not in _groups:
        _groups[key] = dist.new_group(list(chosen))
    return _groups[key]


_groups: dict[Any, Any] = {}


def build(case: Case, models: list[Any] | None = None) -> tuple[Any, list[Any], Any]:
    """(config, model chunks under DistributedDataParallel, optimizer)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = model_config(case) if models is None else models[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.grad_fp32,
        overlap_grad_reduce=case.overlap_grad,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_param_gather=case.overlap_param,
        bucket_size=case.bucket_size,
    )
    bare = models or bare_models(case, config)
    if torch.cuda.is_available():
        for model in bare:
            model.cuda()  # norms are made on the CPU
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0) for index, model in enumerate(bare)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=case.optimizer,
            use_layer_wise_distributed_optimizer=case.layer_wise,
            muon_fp32_matmul_prec="highest",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=case.clip,
            bf16=case.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_param_gather=case.overlap_param,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if case.overlap_grad:
        config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if case.overlap_param:
        config.param_sync_func = [c.start_param_sync for c in chunks] if len(chunks) > 1 else chunks[0].start_param_sync
    return config, chunks, optimizer


def _forward_step(case: Case, data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(SEQ, device="cuda").expand_as(tokens)
    mask = None if case.te else torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device="cuda").triu(1)
    # some positions do not count, and not equally many on every rank
    weight = (labels % 5 != 0).float()
    return model(tokens, positions, mask, labels=labels, loss_mask=weight), partial(_loss, case, weight)


def _loss(case: Case, weight: torch.Tensor, per_token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total, count = (per_token.float() * weight).sum(), weight.sum()
    reported = torch.stack([total.detach(), count])
    if case.per_token:
        return total, count.to(torch.int), reported
    return total / count, reported

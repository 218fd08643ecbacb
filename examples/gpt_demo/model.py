"""A Megatron-Core GPT, built and trained as any Megatron user would. Whether gtp is behind it is one flag."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import gtp.megatron
from gpt_demo.data import VOCAB, Corpus
from gpt_demo.timeline import Use, timeline


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `--sizes name=value,...` may set. Defaults: 2.8 million parameters, a few minutes of two CPU cores."""

    layers: int = 6
    hidden: int = 192
    heads: int = 6
    seq: int = 128
    batch: int = 8
    """Sequences per data rank and step."""
    lr: float = 2e-3


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one run spreads over the ranks: tensor parallel x GTP; the rest is data parallel."""

    name: str
    tp: int
    gtp: int


@dataclasses.dataclass
class Result:
    """What one run leaves behind, on this rank."""

    layout: Layout
    losses: list[float]
    """Training loss per step in nats per byte, mean over all data ranks."""
    held_out_bits: float
    bytes_weights: int
    bytes_grads: int
    bytes_optimizer: int
    bytes_buffers: int
    """Peak of what gtp holds beside: gathered weights and full gradients on their way."""
    seconds: float
    tokens_per_second: float
    stats: Any
    timeline: list[Use]


def run(
    layout: Layout, sizes: Sizes, corpus: Corpus, *, steps: int, seed: int, bf16: bool,
    report: Callable[[int, float, float, int], None],
) -> Result:  # fmt: skip
    """Builds the model in `layout`, trains it for `steps`, evaluates it, and takes the process groups down again.

    `report(step, loss, tokens_per_second, bytes_held)` is called on every rank after each step.
    """
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp, gtp_remat_size=layout.gtp)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    try:
        return _train(layout, sizes, corpus, steps, seed, bf16, report)
    finally:
        parallel_state.destroy_model_parallel()


def _train(
    layout: Layout, sizes: Sizes, corpus: Corpus, steps: int, seed: int, bf16: bool,
    report: Callable[[int, float, float, int], None],
) -> Result:  # fmt: skip
    model, optimizer = build(layout, sizes, bf16)
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    forward_backward = get_forward_backward_func()
    tokens = sizes.batch * sizes.seq * data_size
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(steps):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = sizes.lr * min(1.0, (step + 1) / max(steps // 10, 1), (steps - step) / max(steps // 4, 1))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batch = corpus.batch(step=step, data_rank=data_rank, batch=sizes.batch, seq=sizes.seq, seed=seed)
        (loss,) = forward_backward(
            forward_step_func=_forward_step, data_iterator=iter([batch]), model=[model], num_microbatches=1,
            seq_length=sizes.seq, micro_batch_size=sizes.batch,
        )  # fmt: skip
        optimizer.step()
        losses.append(_mean_over_data(loss))
        report(step, losses[-1], tokens / (time.perf_counter() - begun), _bytes_held(model, optimizer))
    seconds = time.perf_counter() - started
    runtime = gtp.megatron.runtime_of(model) if layout.gtp > 1 else None
    uses = timeline(runtime) if runtime is not None else []
    bits = _evaluate(model, corpus, sizes, data_rank, data_size)
    weights, grads, state = memory(model, optimizer)
    stats = runtime.stats() if runtime is not None else None
    return Result(
        layout=layout,
        losses=losses,
        held_out_bits=bits,
        bytes_weights=weights,
        bytes_grads=grads,
        bytes_optimizer=state,
        bytes_buffers=stats.peak_leased_bytes + stats.peak_wgrad_bytes if stats is not None else 0,
        seconds=seconds,
        tokens_per_second=tokens * steps / seconds,
        stats=stats,
        timeline=uses,
    )


def build(layout: Layout, sizes: Sizes, bf16: bool) -> tuple[DistributedDataParallel, Any]:
    """The model under Megatron's DistributedDataParallel, and its Adam."""
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        tensor_model_parallel_size=layout.tp,
        tensor_parallel_num_weight_shards=layout.tp * layout.gtp,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=sizes.seq,
        position_embedding_type="rope",
    )
    gpt.to(torch.cuda.current_device())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=bf16), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=sizes.lr, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.0, bf16=bf16,
            params_dtype=config.params_dtype,
        ),
        [model],
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data).to(torch.cuda.current_device())
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    # True where attention may not look
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, mask, labels=labels), _mean_loss


def _mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = per_token.float().mean()
    return loss, loss.detach()


def _mean_over_data(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total) / parallel_state.get_data_parallel_world_size()


@torch.no_grad()
def _evaluate(model: torch.nn.Module, corpus: Corpus, sizes: Sizes, data_rank: int, data_size: int) -> float:
    """Loss on held-out text in bits per byte, over all data ranks."""
    model.eval()
    sequences = corpus.evaluation(data_rank=data_rank, data_size=data_size, count=32, seq=sizes.seq)
    losses = [_forward_step(iter([part]), model)[0].float().mean() for part in sequences.split(sizes.batch)]
    model.train()
    return _mean_over_data(torch.stack(losses).mean()) / torch.log(torch.tensor(2.0)).item()


def memory(model: DistributedDataParallel, optimizer: Any) -> tuple[int, int, int]:
    """Bytes on this rank: (weights, gradients, optimizer state with its fp32 copies), each storage counted once."""
    weights = _storages(p.detach() for p in model.parameters())
    grads = _storages(p.main_grad for p in model.parameters())
    state = _storages(_tensors([o.optimizer.state for o in _optimizers(optimizer)]))
    masters = _storages(p.main_param for p in model.parameters() if getattr(p, "main_param", None) is not None)
    return _total(weights), _total(grads), _total(state) + _total(masters)


def _bytes_held(model: DistributedDataParallel, optimizer: Any) -> int:
    return sum(memory(model, optimizer))


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _total(storages: dict[int, int]) -> int:
    return sum(storages.values())

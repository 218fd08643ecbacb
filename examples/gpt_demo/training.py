"""One run of the demo: build, train, evaluate, measure, and take the process groups down again."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import gtp.megatron
from gpt_demo import checkpoint
from gpt_demo.data import Corpus
from gpt_demo.model import build, memory
from gpt_demo.settings import Layout, Options, Sizes
from gpt_demo.timeline import Use, timeline

Report = Callable[[int, float, float, int], None]
"""Called on every rank after each step: step, loss, tokens per second, bytes held."""


@dataclasses.dataclass
class Result:
    """What one run leaves behind, on this rank.

    Attributes:
        losses: Training loss per step in nats per byte, mean over all data ranks.
        held_out_bits: Loss on held-out text at the end, in bits per byte.
        bytes_buffers: Peak of what gtp holds beside: gathered weights and full gradients on their way.
        stats: Of the runtime; None without one.
        timeline: The weights' uses in the last training step.
    """

    layout: Layout
    losses: list[float]
    held_out_bits: float
    bytes_weights: int
    bytes_grads: int
    bytes_optimizer: int
    bytes_buffers: int
    tokens_per_second: float
    stats: Any
    timeline: list[Use]


def run(
    layout: Layout, sizes: Sizes, options: Options, corpus: Corpus, report: Report, save: Path | None = None
) -> Result:
    """Trains the model in `layout`; with `save`, writes a checkpoint at the end."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, gtp_remat_size=layout.gtp, expert_gtp_remat_size=layout.gtp
    )
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed, force_reset_rng=True)
    try:
        return _run(layout, sizes, options, corpus, report, save)
    finally:
        parallel_state.destroy_model_parallel()


def _run(layout: Layout, sizes: Sizes, options: Options, corpus: Corpus, report: Report, save: Path | None) -> Result:
    model, optimizer = build(layout, sizes, options)
    if options.load is not None:
        checkpoint.load(options.load, model, optimizer)
    started = time.perf_counter()
    losses = list(_train(model, optimizer, sizes, options, corpus, report))
    seconds = time.perf_counter() - started
    runtime = gtp.megatron.runtime_of(model) if layout.gtp > 1 else None
    uses = timeline(runtime) if runtime is not None else []
    held_out = _evaluate(model, corpus, sizes)
    if save is not None:
        checkpoint.save(save, model, optimizer)
    weights, grads, state = memory(model, optimizer)
    stats = runtime.stats() if runtime is not None else None
    return Result(
        layout=layout,
        losses=losses,
        held_out_bits=held_out,
        bytes_weights=weights,
        bytes_grads=grads,
        bytes_optimizer=state,
        bytes_buffers=stats.peak_leased_bytes + stats.peak_wgrad_bytes if stats is not None else 0,
        tokens_per_second=_tokens_per_step(sizes) * options.steps / seconds,
        stats=stats,
        timeline=uses,
    )


def _train(
    model: Any, optimizer: Any, sizes: Sizes, options: Options, corpus: Corpus, report: Report
) -> Iterator[float]:
    forward_backward, data_rank = get_forward_backward_func(), parallel_state.get_data_parallel_rank()
    for step in range(options.steps):
        begun = time.perf_counter()
        warm, cool = (step + 1) / max(options.steps // 10, 1), (options.steps - step) / max(options.steps // 4, 1)
        for group in optimizer.param_groups:
            group["lr"] = sizes.lr * min(1.0, warm, cool)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batch = corpus.batch(step=step, data_rank=data_rank, batch=sizes.batch, seq=sizes.seq, seed=options.seed)
        (loss,) = forward_backward(
            forward_step_func=_forward_step,
            data_iterator=iter([batch]),
            model=[model],
            num_microbatches=1,
            seq_length=sizes.seq,
            micro_batch_size=sizes.batch,
        )
        optimizer.step()
        mean = _mean_over_data(loss)
        report(step, mean, _tokens_per_step(sizes) / (time.perf_counter() - begun), sum(memory(model, optimizer)))
        yield mean


@torch.no_grad()
def _evaluate(model: torch.nn.Module, corpus: Corpus, sizes: Sizes) -> float:
    """Loss on held-out text in bits per byte, over all data ranks."""
    model.eval()
    sequences = corpus.evaluation(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        count=32,
        seq=sizes.seq,
    )
    losses = [_forward_step(iter([part]), model)[0].float().mean() for part in sequences.split(sizes.batch)]
    model.train()
    return _mean_over_data(torch.stack(losses).mean()) / math.log(2)


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


def _tokens_per_step(sizes: Sizes) -> int:
    return sizes.batch * sizes.seq * parallel_state.get_data_parallel_world_size()

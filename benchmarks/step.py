"""Forward and backward of a stack of transformer layers: gtp, FSDP2 and no sharding at all, in one run.

    python -m benchmarks.step                 one rank per GPU
    python -m benchmarks.step --quick --cases "llama 1024"
    python -m benchmarks.step --device cpu --tiny

`ratio` is the unsharded stack's median over the row's: 1 would be sharding for free. The unsharded stack communicates
nothing. `wire_mb` is what one rank receives per step; memory is the peak of one step, without the other variants.
Modes: `eager`; `graphed`, the step is one CUDA graph; `blocks graphed`, an eager loop over blocks that are graphs of
their own, forward and backward each, by `gtp.make_graphed_callables`.
Ranks outnumber GPUs? Then they share one: only `host_ms` and memory mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gtp
from benchmarks import common
from benchmarks.models import LLAMA, MOE, TINY, TINY_MOE, Block, Sizes, Stack, make_stack


@dataclasses.dataclass
class Variant:
    """A stack under one kind of sharding."""

    name: str
    model: nn.Module
    runtime: gtp.GTPRuntime | None
    own_bytes: int  # what it keeps between steps


class Skip(Exception):
    """This variant cannot run here; the message says why."""


def unsharded(stack: Stack, args: argparse.Namespace) -> None:
    return None


def gtp_variant(**config: Any) -> Callable[[Stack, argparse.Namespace], gtp.GTPRuntime]:
    def shard(stack: Stack, args: argparse.Namespace) -> gtp.GTPRuntime:
        if config["transport"] == "copy_engine" and args.device == "cpu":
            raise Skip("the CPU has no copy engines")
        if config["transport"] == "process_group" and args.device == "cuda" and dist.get_backend() == "gloo":
            raise Skip("gloo on GPUs measures the host's memory")
        options = {"reduce_sms": args.reduce_sms, **config}
        if args.prefetch_mb is not None:
            options["prefetch_bytes"] = args.prefetch_mb << 20
        options["keep_bytes"] = config.get("keep_bytes", 0) * sum(p.numel() for p in stack.parameters()) * 2 // 100
        return gtp.shard_model(stack, dist.group.WORLD, config=gtp.GTPConfig(**options))

    return shard


def fsdp(per: type[nn.Module], *, symmetric: bool = False) -> Callable[[Stack, argparse.Namespace], None]:
    def shard(stack: Stack, args: argparse.Namespace) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if symmetric and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
            raise Skip(f"torch {torch.__version__} has no FSDPModule.set_symm_mem_for_comm")
        if symmetric and args.device == "cpu":
            raise Skip("symmetric memory is GPU memory")
        if args.device == "cuda" and dist.get_backend() == "gloo":
            raise Skip("FSDP2 over gloo on GPUs measures the host's memory")
        for module in [m for m in stack.modules() if isinstance(m, per) and m is not stack]:
            fully_shard(module)
        fully_shard(stack)
        if symmetric:
            for module in stack.modules():
                if isinstance(module, FSDPModule):
                    module.set_symm_mem_for_comm()

    return shard


def megatron(stack: Stack, args: argparse.Namespace) -> None:
    missing = [name for name in ("megatron.core", "transformer_engine.pytorch") if not _installed(name)]
    if missing:
        raise Skip(f"not installed: {', '.join(missing)}")
    raise Skip("Megatron-Core's GTP shards Transformer Engine modules, and this stack is plain torch")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


VARIANTS: dict[str, Callable[[Stack, argparse.Namespace], gtp.GTPRuntime | None]] = {
    "unsharded": unsharded,
    "gtp copy_engine": gtp_variant(transport="copy_engine"),
    "gtp copy_engine, keep 25%": gtp_variant(transport="copy_engine", keep_bytes=25),
    "gtp process_group": gtp_variant(transport="process_group"),
    "fsdp2 per block": fsdp(Block),
    "fsdp2 per linear": fsdp(nn.Linear),
    "fsdp2 per linear, symmetric memory": fsdp(nn.Linear, symmetric=True),
    "megatron-core gtp": megatron,
}


def build(name: str, sizes: Sizes, device: torch.device, args: argparse.Namespace, tokens: int) -> Variant:
    """Shards a fresh stack and runs a few steps, so that all pools are filled."""
    before = _allocated(device)
    model = make_stack(sizes, device)
    runtime = VARIANTS[name](model, args)
    step, _ = step_of(model, sizes, tokens, device)
    for _ in range(3):
        step()
    model.zero_grad(set_to_none=True)
    common.synchronize(device)
    gc.collect()
    return Variant(name, model, runtime, _allocated(device) - before)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def step_of(
    model: nn.Module, sizes: Sizes, tokens: int, device: torch.device
) -> tuple[Callable[[], None], torch.Tensor]:
    """Forward and backward on random data of this rank, and the input."""
    generator = torch.Generator(device).manual_seed(1000 + (dist.get_rank() if dist.is_initialized() else 0))
    dtype = next(model.parameters()).dtype
    x = torch.randn(tokens, sizes.hidden, generator=generator, device=device).to(dtype)
    gradient = torch.randn(tokens, sizes.hidden, generator=generator, device=device).to(dtype)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward(gradient)

    return step, x


def graphed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """One CUDA graph of the step."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    common.synchronize(device)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    common.synchronize(device)
    dist.barrier()
    return graph.replay


@contextlib.contextmanager
def blocks_graphed(stack: nn.Module, x: torch.Tensor) -> Iterator[None]:
    """The blocks are graphed callables, within."""
    assert isinstance(stack, Stack)
    blocks = tuple(stack.blocks)
    samples = tuple((torch.randn_like(x).requires_grad_(i > 0),) for i in range(len(blocks)))
    forwards = [block.forward for block in blocks]
    gtp.make_graphed_callables(blocks, samples)
    try:
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward


def extra_of(variant: Variant, step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Memory and traffic of one step."""
    stats = variant.runtime.stats() if variant.runtime else None
    extra: dict[str, Any] = {}
    variant.model.zero_grad(set_to_none=True)
    common.synchronize(device)
    before = _allocated(device)
    peak = common.peak_memory(step, device)
    if peak is not None:
        outside = common.bytes_outside(variant.runtime.transport) if variant.runtime else 0
        extra["peak_bytes"] = variant.own_bytes + outside + peak - before
    if stats is not None and variant.runtime is not None:
        after = variant.runtime.stats()
        moved = after.bytes_gathered - stats.bytes_gathered + after.bytes_reduced - stats.bytes_reduced
        size = dist.get_world_size()
        extra["wire_mb"] = round(moved * (size - 1) / size / 1e6, 1)
        consumes, hits = after.consumes - stats.consumes, after.prefetch_hits - stats.prefetch_hits
        extra["hit_rate"] = round(hits / max(consumes, 1), 3)
        extra["transport_reason"] = after.transport_reason
    return extra


def run(device: torch.device, args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    models = {"llama": TINY if args.tiny else LLAMA, "moe": TINY_MOE if args.tiny else MOE}
    tokens_of = [64, 32] if args.tiny else [4096, 2048, 1024, 512]
    if args.tokens:
        tokens_of = [int(t) for t in args.tokens.split(",")]
    for model_name, sizes in models.items():
        cases = [(f"{model_name} {t}", t) for t in tokens_of if common.wanted(f"{model_name} {t}", args.cases)]
        if not cases:
            continue
        if args.layers:
            sizes = dataclasses.replace(sizes, layers=args.layers)
        variants = []
        for name in VARIANTS:
            if name != "unsharded" and not common.wanted(name, args.impls):
                continue
            try:
                variants.append(build(name, sizes, device, args, max(t for _, t in cases)))
            except Skip as reason:
                skipped[name] = str(reason)
        for case, tokens in cases:
            rows += measure_eager(case, tokens, sizes, variants, device, args)
        if device.type == "cuda" and not args.no_graphs:
            # after all eager rows, whose memory would be that of graphs otherwise
            for case, tokens in cases:
                rows += measure_graphs(case, tokens, sizes, variants, device, args)
        del variants
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for name, reason in skipped.items():
        common.say(f"skipped {name}: {reason}")
    fields = {"models": {k: dataclasses.asdict(v) for k, v in models.items()}, "skipped": skipped}
    common.write("step", device, rows, args, **fields)


def measure_eager(
    case: str, tokens: int, sizes: Sizes, variants: list[Variant], device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    steps = {v.name: step_of(v.model, sizes, tokens, device)[0] for v in variants}
    timings = common.interleave(steps, device, rounds=rounds_of(args), iterations=args.iterations)
    extra = {v.name: extra_of(v, steps[v.name], device) for v in variants}
    return shown(common.rows_of(case, "eager", timings, reference="unsharded", extra=extra))


def measure_graphs(
    case: str, tokens: int, sizes: Sizes, variants: list[Variant], device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of whole steps in a graph, then those of graphed blocks."""
    rounds = rounds_of(args)
    capturable = [v for v in variants if v.name == "unsharded" or "copy_engine" in v.name]
    steps = {v.name: step_of(v.model, sizes, tokens, device)[0] for v in capturable}
    graphs = {v.name: graphed(steps[v.name], device) for v in capturable}
    timings = common.interleave(graphs, device, rounds=rounds, iterations=args.iterations)
    rows = common.rows_of(case, "graphed", timings, reference="unsharded")
    del graphs
    for variant in variants:
        variant.model.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as within:
        for v in capturable:
            within.enter_context(blocks_graphed(v.model, step_of(v.model, sizes, tokens, device)[1]))
        timings = common.interleave(steps, device, rounds=rounds, iterations=args.iterations)
    rows += common.rows_of(case, "blocks graphed", timings, reference="unsharded")
    return shown(rows)


def rounds_of(args: argparse.Namespace) -> int:
    return 3 if args.tiny else 7 if args.quick else 21


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows`, printed."""
    columns = [
        "case",
        "impl",
        "mode",
        "ms",
        "ms_min",
        "ms_max",
        "host_ms",
        "ratio",
        "peak_bytes",
        "wire_mb",
        "hit_rate",
    ]
    common.say(common.table(rows, columns))
    return rows


def main() -> None:
    parser = common.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--impls", default=None, help="comma-separated parts of variant names")
    parser.add_argument("--tokens", default=None, help="comma-separated tokens per rank")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--iterations", type=int, default=2, help="steps per sample")
    parser.add_argument("--reduce-sms", type=int, default=gtp.GTPConfig().reduce_sms)
    parser.add_argument("--prefetch-mb", type=int, default=None)
    parser.add_argument("--no-graphs", action="store_true")
    common.launch(run, parser.parse_args())


if __name__ == "__main__":
    main()

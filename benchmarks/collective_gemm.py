"""Collective GEMMs of tensor parallelism, by every backend, against the GEMM alone.

    python -m benchmarks.collective_gemm                 every GPU of the host is a rank
    python -m benchmarks.collective_gemm --explore       the copy engine's settings as well
    python -m benchmarks.collective_gemm --page          the table of docs/performance.md, from the result file

Cases are the linears of Llama-3 8B and 70B. On fewer GPUs than a case's degree it is a simulation: each rank has the
weights of that degree, and the activations travel between the ranks that there are. "gemm" is the same product of a
rank, on operands that are already whole, and nothing sent. `ratio` is its time over the row's: 1 is perfect overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from gtp.ops import GemmBackend, all_gather_linear, gemm_backend, linear_reduce_scatter
from gtp.ops.collective_backends import SingleRankBackend, copy_engine


@dataclasses.dataclass(frozen=True)
class Case:
    """One linear: `m` rows, `k` in and `n` out features of one rank's GEMM."""

    name: str
    gathers: bool
    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n


# hidden, feed-forward, and query-key-value features of the whole model
MODELS = {"8B": (4096, 14336, 6144), "70B": (8192, 28672, 10240)}


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The table's shapes, the square one of the headline first."""
    yield Case("4096 x 4096 x 7168, all-gather", True, 4096, 7168, 4096)
    yield Case("4096 x 4096 x 7168, reduce-scatter", False, 4096, 7168, 4096)
    for model, (hidden, ffn, qkv) in MODELS.items():
        for degree in args.degrees:
            for m in args.tokens:
                where = f"{model} tp{degree} {m} tokens"
                yield Case(f"{where}, qkv", True, m, hidden, qkv // degree)
                yield Case(f"{where}, wo", False, m, hidden // degree, hidden)
                yield Case(f"{where}, w13", True, m, hidden, 2 * ffn // degree)
                yield Case(f"{where}, w2", False, m, ffn // degree, hidden)


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny, all-gather", True, 64, 32, 48)
    yield Case("tiny, reduce-scatter", False, 64, 32, 48)


GRAPHED = 4  # operations in one graph, so that what a launch of the graph costs is shared by some


@contextmanager
def settings(**constants: int) -> Iterator[None]:
    """Other thresholds of the copy engine, for a look at what they do."""
    before = {name: getattr(copy_engine, name) for name in constants}
    for name, value in constants.items():
        setattr(copy_engine, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(copy_engine, name, value)


@dataclasses.dataclass
class Operands:
    """One rank's tensors of a case, in bf16 on GPUs."""

    case: Case
    shard: torch.Tensor  # what this rank has: rows/R x k, or rows x k
    whole: torch.Tensor  # what its GEMM multiplies: rows x k
    weight: torch.Tensor
    dy: torch.Tensor  # of the shard's result
    dy_whole: torch.Tensor  # of the GEMM's result

    @classmethod
    def make(cls, case: Case, device: torch.device) -> Operands:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = dist.get_world_size()

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        whole, weight = values(case.m, case.k), values(case.n, case.k) / case.k**0.5
        dy_whole = values(case.m, case.n)
        rows = case.m // size
        shard = whole[:rows].clone() if case.gathers else whole
        dy = dy_whole if case.gathers else dy_whole[:rows].clone()
        for t in (whole, weight):
            t.requires_grad_()
        shard = shard.detach().requires_grad_()
        return cls(case, shard, whole, weight, dy, dy_whole)

    def forward(self, backend: GemmBackend) -> torch.Tensor:
        x = self.whole if isinstance(backend, SingleRankBackend) else self.shard
        op = all_gather_linear if self.case.gathers else linear_reduce_scatter
        return op(x, self.weight, backend=backend)

    def both(self, backend: GemmBackend) -> tuple[torch.Tensor | None, ...]:
        alone = isinstance(backend, SingleRankBackend)
        x = self.whole if alone else self.shard
        x.grad = self.weight.grad = None
        self.forward(backend).backward(self.dy_whole if alone else self.dy)
        return x.grad, self.weight.grad


def graph_of(step: Callable[[], object], device: torch.device, count: int = 1) -> Callable[[], object]:
    """`count` times `step` as a CUDA graph: what is left without the host."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            step()
    return graph.replay


def variants(
    run: Callable[[GemmBackend], object], backends: dict[str, GemmBackend], explore: bool
) -> dict[str, Callable[[], object]]:
    """Per implementation, one step."""
    steps: dict[str, Callable[[], object]] = {name: lambda b=b: run(b) for name, b in backends.items()}
    engine = backends.get("copy_engine")
    if explore and engine is not None:

        def with_settings(**constants: int) -> Callable[[], object]:
            def step() -> object:
                with settings(**constants):
                    return run(engine)

            return step

        steps["copy_engine, uncut"] = with_settings(_TILE=1 << 60)
        steps["copy_engine, always cut"] = with_settings(_TILE=1)
    return steps


def check(operands: Operands, backends: dict[str, GemmBackend]) -> None:
    """All implementations give the same, up to the rounding of sums over ranks."""
    want = operands.forward(backends["unfused"]).detach().float()
    scale = float(want.abs().max())
    for name in ("symm_mem", "copy_engine"):
        if name in backends:
            error = float((operands.forward(backends[name]).detach().float() - want).abs().max())
            if not error <= 2.0**-6 * scale:
                raise SystemExit(f"{operands.case.name}: {name} differs from unfused by {error} of {scale}")


def backends_of(device: torch.device) -> dict[str, GemmBackend]:
    """Every implementation that runs here; "gemm" is the product alone."""
    backends: dict[str, GemmBackend] = {"gemm": SingleRankBackend()}
    backends["unfused"] = gemm_backend("collective", dist.group.WORLD)
    if device.type == "cuda":
        for name in ("symm_mem", "copy_engine"):
            backends[name] = gemm_backend(name, dist.group.WORLD, device=device)
    return backends


def run(device: torch.device, args: argparse.Namespace) -> None:
    """On every rank."""
    backends = backends_of(device)
    rows: list[dict[str, Any]] = []
    rounds = 5 if args.quick else 9
    for case in tiny_cases() if args.tiny else cases(args):
        if not common.wanted(case.name, args.cases):
            continue
        operands = Operands.make(case, device)
        check(operands, backends)
        graphs = device.type == "cuda" and dist.get_backend() == "nccl"
        calls = {"forward": torch.no_grad()(operands.forward), "forward and backward": operands.both}
        # the largest workspaces first: torch's moves when it grows, and leaves a graph that was captured before with
        # memory that is gone
        for backend in backends.values():
            operands.both(backend)
        for mode, call in calls.items():
            steps = variants(call, backends, args.explore)
            rows += timed(case, mode, steps, device, rounds, 1)
            if graphs:
                captured = {name: graph_of(step, device, GRAPHED) for name, step in steps.items()}
                rows += timed(case, f"{mode}, graph", captured, device, rounds, GRAPHED)
                del captured
        del operands, calls, steps
        common.write("collective_gemm", device, rows, args)  # a run that is cut short leaves what it has
    summary(rows)


def timed(
    case: Case, mode: str, steps: dict[str, Callable[[], object]], device: torch.device, rounds: int, count: int
) -> list[dict[str, Any]]:
    """Rows of one case and mode. Each step is `count` operations; samples are so long that a slow start is lost."""
    gemm_ms = case.flops * (3 if "backward" in mode else 1) / 7e11
    iterations = max(2, min(32, round(8 / gemm_ms))) // count or 1
    timings = common.interleave(steps, device, rounds=rounds, iterations=iterations if device.type == "cuda" else 1)
    for timing in timings.values():
        timing.ms = [ms / count for ms in timing.ms]
        timing.host_ms = [ms / count for ms in timing.host_ms]
    eager = {} if count > 1 else steps
    extra = {name: {"peak_bytes": common.peak_memory(step, device)} for name, step in eager.items()}
    new = common.rows_of(case.name, mode, timings, reference="gemm", extra=extra)
    unfused = next(row["ms"] for row in new if row["impl"] == "unfused")
    for row in new:
        products = 3 if "backward" in mode else 1
        row["tflops"] = round(products * case.flops / row["ms"] / 1e9, 1)
        row["speedup_over_unfused"] = common.significant(unfused / row["ms"])
    common.say(f"{case.name}: {mode}")
    common.say(common.table(new, ["impl", "ms", "ms_min", "ms_max", "host_ms", "ratio", "tflops"]))
    return new


def page(result: dict[str, Any]) -> str:
    """The table of docs/performance.md: per case, the ratio to the GEMM alone, eager and graphed."""
    names = {"unfused": "unfused", "symm_mem": "torch fused", "copy_engine": "copy engine"}
    modes = ["forward", "forward, graph", "forward and backward", "forward and backward, graph"]
    found = {(row["case"], row["mode"], row["impl"]): row for row in result["rows"]}
    lines = ["| | mode | GEMM alone, ms | " + " | ".join(names.values()) + " | copy engine, ms (smallest to largest) |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        for mode in modes:
            ratios = [f"{found[case, mode, name]['ratio']:.2f}" for name in names]
            ours = found[case, mode, "copy_engine"]
            spread = f"{ours['ms']:.3f} ({ours['ms_min']:.3f} to {ours['ms_max']:.3f})"
            alone = f"{found[case, mode, 'gemm']['ms']:.3f}"
            lines.append(f"| {case} | {mode} | {alone} | " + " | ".join(ratios) + f" | {spread} |")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> None:
    """The copy engine against torch's operators, and against the better of the others, over all cases."""
    for mode in dict.fromkeys(row["mode"] for row in rows):
        by_case: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["mode"] == mode:
                by_case.setdefault(row["case"], {})[row["impl"]] = row["ms"]
        over_torch = sorted(c["symm_mem"] / c["copy_engine"] for c in by_case.values() if "copy_engine" in c)
        over_best = [
            (min(c["symm_mem"], c["unfused"]) / c["copy_engine"], name)
            for name, c in by_case.items()
            if "copy_engine" in c
        ]
        if over_torch:
            worst, name = min(over_best)
            common.say(
                f"{mode}: copy_engine over symm_mem {over_torch[len(over_torch) // 2]:.3f} in the median; over the "
                f"better of symm_mem and unfused at worst {worst:.3f} ({name})"
            )


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--tokens", type=lambda s: [int(t) for t in s.split(",")], default=[2048, 8192])
    parser.add_argument("--degrees", type=lambda s: [int(t) for t in s.split(",")], default=[2])
    parser.add_argument("--explore", action="store_true", help="time other settings of the copy engine too")
    parser.add_argument("--page", action="store_true", help="print the result file as the table of docs/performance.md")
    args = parser.parse_args()
    if args.page:
        print(page(json.loads((args.out or common.RESULTS / "collective_gemm.json").read_text())))
    else:
        common.launch(run, args)


if __name__ == "__main__":
    main()

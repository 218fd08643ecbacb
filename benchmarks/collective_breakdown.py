"""Where a collective GEMM's time goes: host, idle device, exposed copies, and which kernels it runs.

    python -m benchmarks.collective_breakdown --cases "4096 x"

Per case of `benchmarks.collective_gemm` and implementation: the host's time alone (queued on an idle device), the
device's time eager and as a CUDA graph, and from a profiler trace of graph replays the time in compute, in copies and
in neither. On a CPU the host's column is all there is.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.collective_gemm import Operands, backends_of, cases, graph_of, tiny_cases
from benchmarks.overlap import Event, account, profile

REPEATS = 4  # operations in one graph and one trace


def breakdown(traces: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Milliseconds per operation, medians over traces, and kernels by name."""
    accounts = [account(events) for events in traces]
    row: dict[str, Any] = {}
    kinds = ("copy_ms", "copy_exposed_ms", "local_copy_ms", "local_copy_exposed_ms", "collective_exposed_ms")
    for key in ("step_ms", "compute_ms", *kinds, "idle_ms"):
        row[key.replace("step", "trace")] = round(statistics.median(a.get(key, 0.0) for a in accounts) / REPEATS, 4)
    total: dict[str, list[float]] = defaultdict(list)
    for event in traces[len(traces) // 2]:
        total[event.name].append(event.end - event.start)
    row["kernels"] = {
        name[:90]: {"per_op": len(us) / REPEATS, "us": round(statistics.mean(us), 2)}
        for name, us in sorted(total.items(), key=lambda item: -sum(item[1]))[:8]
    }
    row["timeline"] = timeline(traces[len(traces) // 2])
    return row


def timeline(events: Sequence[Event]) -> list[str]:
    """The second operation of a trace, or a quarter of what there is: when each thing ran, on which stream."""
    first = len(events) // REPEATS
    part = events[first : 2 * first + 2]
    return [
        f"{e.start - part[0].start:9.1f} {e.end - e.start:8.1f} us  stream {e.stream:3}  {e.name[:60]}" for e in part
    ]


def measure(step: Callable[[], object], device: torch.device, rounds: int) -> dict[str, Any]:
    """One implementation of one case."""
    row: dict[str, Any] = {"host_us": round(1e3 * common.host_time(step, device, rounds=rounds), 1)}

    def repeated() -> None:
        for _ in range(REPEATS):
            step()

    variants = {"eager": repeated}
    if device.type == "cuda" and dist.get_backend() == "nccl":
        variants["graph"] = graph_of(step, device, REPEATS)
    for name, timing in common.interleave(variants, device, rounds=rounds, iterations=4).items():
        row[f"{name}_ms"] = round(timing.median / REPEATS, 4)
    if device.type == "cuda":
        row.update(breakdown(profile(variants.get("graph", repeated), 3, device)))
    return row


def run(device: torch.device, args: argparse.Namespace) -> None:
    """On every rank."""
    backends = backends_of(device)
    rows = []
    for case in tiny_cases() if args.tiny else cases(args):
        if not common.wanted(case.name, args.cases):
            continue
        operands = Operands.make(case, device)
        modes = {"forward": torch.no_grad()(operands.forward), "forward and backward": operands.both}
        for mode, call in modes.items():
            for name, backend in backends.items():
                step = lambda call=call, backend=backend: call(backend)  # noqa: E731
                rows.append({"case": case.name, "mode": mode, "impl": name, **measure(step, device, args.rounds)})
        columns = ["impl", "mode", "host_us", "eager_ms", "graph_ms", "trace_ms", "compute_ms", "copy_ms",
                   "copy_exposed_ms", "local_copy_exposed_ms", "collective_exposed_ms", "idle_ms"]  # fmt: skip
        common.say(case.name)
        common.say(common.table([row for row in rows if row["case"] == case.name], columns))
    for row in rows:
        if "kernels" in row and row["impl"] == "copy_engine":
            common.say(f"{row['case']}: {row['mode']}")
            for name, numbers in row["kernels"].items():
                common.say(f"  {numbers['per_op']:5.2f} x {numbers['us']:8.2f} us  {name}")
            for line in row["timeline"]:
                common.say("  " + line)
    common.write("collective_breakdown", device, rows, args)


def main() -> None:
    parser = common.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=lambda s: [int(t) for t in s.split(",")], default=[2048, 8192])
    parser.add_argument("--degrees", type=lambda s: [int(t) for t in s.split(",")], default=[2])
    parser.add_argument("--rounds", type=int, default=9)
    common.launch(run, parser.parse_args())


if __name__ == "__main__":
    main()

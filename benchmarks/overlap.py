"""How much of each copy and reduction ran beside compute, and how much of it the step had to wait for. Two GPUs.

    python -m benchmarks.overlap --cases llama --tokens 2048

Profiles a few steps of the models of `benchmarks.step` under the copy engine, sorts what the GPU did into compute,
copies between GPUs, copies on one GPU (of a rank's own shard into the gathered weight), additions and collectives, and
counts for each how long it ran, how much of that lay under compute, and how long it ran without any (exposed). Writes
the numbers as JSON and one step as a picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import gtp
from benchmarks import common, step
from benchmarks.models import LLAMA, MOE, TINY, TINY_MOE

MODELS = {"llama": (LLAMA, TINY), "moe": (MOE, TINY_MOE)}

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that the GPU did, in microseconds."""

    kind: str
    name: str
    stream: int
    start: float
    end: float


def kind_of(name: str) -> str:
    """Compute, or what kind of communication. In graphs, large copies on one GPU are kernels of the driver."""
    if "Memcpy PtoP" in name:
        return "copy"
    if "Memcpy DtoD" in name or name.startswith("memcpy"):
        return "local_copy"
    if "fused_add_kernel" in name:
        return "addition"
    if "nccl" in name.lower():
        return "collective"
    return "compute"


def events_of(trace: dict[str, Any]) -> list[Event]:
    """The GPU's events of a Chrome trace of torch.profiler."""
    found = []
    for e in trace["traceEvents"]:
        category = e.get("cat", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, duration = float(e["ts"]), float(e["dur"])
            stream = int(e.get("args", {}).get("stream", e.get("tid", 0)))
            found.append(Event(kind_of(e["name"]), e["name"], stream, start, start + duration))
    return sorted(found, key=lambda e: e.start)


def union(spans: Sequence[Span]) -> list[Span]:
    """Spans that overlap or touch become one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def common_part(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Where two lists of disjoint, sorted spans overlap."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def account(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds per kind: busy, under compute, exposed (it runs and no compute does); and the idle rest."""
    spans: dict[str, list[Span]] = {}
    for e in events:
        spans.setdefault(e.kind, []).append((e.start, e.end))
    compute = union(spans.pop("compute", []))
    result = {"compute_ms": length(compute) / 1e3}
    for kind, those in spans.items():
        busy = union(those)
        hidden = length(common_part(busy, compute))
        result[f"{kind}_ms"] = length(busy) / 1e3
        result[f"{kind}_hidden_ms"] = hidden / 1e3
        result[f"{kind}_exposed_ms"] = (length(busy) - hidden) / 1e3
        result[f"{kind}_hidden_share"] = hidden / length(busy) if busy else 1.0
    everything = union([(e.start, e.end) for e in events])
    total = everything[-1][1] - everything[0][0] if everything else 0.0
    result["step_ms"] = total / 1e3
    result["not_compute_ms"] = (total - length(compute)) / 1e3
    result["idle_ms"] = (total - length(everything)) / 1e3
    return {key: round(value, 4) for key, value in result.items()}


def picture(events: Sequence[Event], path: pathlib.Path, title: str) -> None:
    """One step as a timeline, a row per stream."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {
        "compute": "#9aa5b1", "copy": "#2a9d8f", "local_copy": "#e9c46a", "addition": "#e76f51", "collective": "#7b2cbf"
    }  # fmt: skip
    streams = sorted({e.stream for e in events}, key=lambda s: min(e.start for e in events if e.stream == s))
    begin = min(e.start for e in events)
    figure, axes = pyplot.subplots(figsize=(16, 0.6 * len(streams) + 1.6))
    for row, stream in enumerate(streams):
        for kind, color in colors.items():
            bars = [
                ((e.start - begin) / 1e3, (e.end - e.start) / 1e3)
                for e in events
                if (e.stream, e.kind) == (stream, kind)
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, label=kind if bars else None)
    axes.set_yticks(range(len(streams)), [f"stream {s}" for s in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), loc="upper right", ncols=len(unique))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def profile(run_step: Any, steps: int, device: torch.device) -> list[list[Event]]:
    """The GPU's events of each of some steps. Steps are told apart by idle time: each begins on an idle device."""
    found = []
    for _ in range(steps):
        common.synchronize(device)
        torch.distributed.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run_step()
            common.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found.append(events_of(json.loads(path.read_text())))
    return found


def measure(case: str, tokens: int, impl: str, device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One model under one kind of sharding: a row for eager code and, of the copy engine, one for a graph."""
    sizes = MODELS[case][args.tiny]
    variant = step.build(impl, sizes, device, args, tokens)
    run_step, _ = step.step_of(variant.model, sizes, tokens, device)
    modes = {} if args.graphs_only else {"eager": run_step}
    if "copy_engine" in impl and not args.no_graphs:
        modes["graphed"] = step.graphed(run_step, device)
    rows = []
    for mode, call in modes.items():
        call()
        steps = profile(call, 3 if args.quick else 7, device)
        accounts = [account(events) for events in steps]
        middle = sorted(range(len(steps)), key=lambda i: accounts[i]["step_ms"])[len(steps) // 2]
        row: dict[str, Any] = {"case": f"{case} {tokens}", "impl": impl, "mode": mode}
        for key in accounts[middle]:
            row[key] = round(statistics.median(a.get(key, 0.0) for a in accounts), 4)
        rows.append(row)
        if common.is_main():
            out = args.out.parent if args.out else common.RESULTS
            out.mkdir(parents=True, exist_ok=True)
            file = out / f"overlap_{case}_{impl.replace(' ', '_').replace(',', '')}_{tokens}_{mode}.png"
            picture(steps[middle], file, f"{case}, {impl}, {tokens} tokens per rank, {mode}: one step on rank 0")
    return rows


def run(device: torch.device, args: argparse.Namespace) -> None:
    rows = []
    for case in args.cases.split(","):
        for tokens in (int(t) for t in args.tokens.split(",")):
            for impl in args.impls.split(","):
                rows += measure(case, tokens, impl, device, args)
    columns = [
        "case", "impl", "mode", "step_ms", "compute_ms", "copy_ms", "copy_hidden_share", "copy_exposed_ms",
        "local_copy_ms", "local_copy_exposed_ms", "addition_ms", "addition_hidden_share", "not_compute_ms", "idle_ms",
    ]  # fmt: skip
    common.say(common.table(rows, columns))
    common.write("overlap", device, rows, args)


def main() -> None:
    parser = common.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--impls", default="gtp copy_engine")
    parser.add_argument("--tokens", default="4096,2048,1024")
    parser.add_argument("--reduce-sms", type=int, default=gtp.GTPConfig().reduce_sms)
    parser.add_argument("--prefetch-mb", type=int, default=None)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--graphs-only", action="store_true")
    parser.set_defaults(cases="llama,moe")
    args = parser.parse_args()
    if args.device == "cpu":
        parser.error("the trace of a GPU is what this is about; there is none")
    common.launch(run, args)


if __name__ == "__main__":
    main()

"""What the benchmarks share: ranks, timing, environment, tables and result files.

A number means something only beside its reference from the same run: `interleave` times all variants in turns, so that
clocks, temperature and neighbours weigh on all alike, and `rows_of` divides the reference's median by each variant's.
Times over several ranks are the slowest rank's, sample by sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

RESULTS = pathlib.Path(__file__).parent / "results"


# -- command line --------------------------------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--ranks", type=int, default=None, help="processes to start; default: one per GPU, 2 on CPU")
    p.add_argument("--quick", action="store_true", help="fewer rounds and cases: a look, not a result")
    p.add_argument("--tiny", action="store_true", help="sizes for a laptop's CPU: checks that the benchmark runs")
    p.add_argument("--cases", default=None, help="comma-separated parts of case names to run")
    p.add_argument("--out", type=pathlib.Path, default=None, help="result file; default: benchmarks/results/NAME.json")
    return p


def wanted(name: str, cases: str | None) -> bool:
    """Whether `--cases` selects this case."""
    return cases is None or any(part in name for part in cases.split(","))


# -- ranks ---------------------------------------------------------------------------------------------------------


def launch(fn: Callable[[torch.device, argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Runs `fn(device, args)` on every rank, with torch.distributed initialised: under torchrun, or by starting them.

    Where ranks outnumber GPUs they share them, over gloo: right for correctness and host cost, not for NVLink figures.
    """
    if "RANK" in os.environ:
        _on_rank(int(os.environ["RANK"]), fn, args, None)
        return
    count = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    args.ranks = count
    args.command = command()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_on_rank, args=(fn, args, port), nprocs=count)


def _on_rank(
    rank: int, fn: Callable[[torch.device, argparse.Namespace], None], args: argparse.Namespace, port: int | None
) -> None:
    if port is not None:
        env = {"RANK": rank, "WORLD_SIZE": args.ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in env.items()}, MASTER_ADDR="127.0.0.1")
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % gpus)
        torch.cuda.set_device(device)
        shared = int(os.environ["WORLD_SIZE"]) > gpus
        if shared:
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        backend = "gloo" if shared else "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, timeout=datetime.timedelta(seconds=120), device_id=device if backend == "nccl" else None
    )
    try:
        fn(device, args)
        synchronize(device)
        dist.barrier()
        if port is not None:
            # Not by way of the interpreter's end: NCCL does not come back from shutting down the dozens of groups that
            # Megatron has left, and a thread of gloo that lets go of its last tensor then aborts the process.
            sys.stdout.flush()
            os._exit(0)
    finally:
        gc.collect()  # what is left of the models holds process groups
        dist.destroy_process_group()


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Prints once, on the first rank."""
    if is_main():
        print(text, flush=True)


# -- timing --------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclasses.dataclass
class Timing:
    """Samples of one variant, in milliseconds: of the device per step, and of the host until the step is queued."""

    ms: list[float]
    host_ms: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    iterations: int = 1,
    before: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times every variant once per round, `iterations` steps a sample; ranks start each sample together.

    Args:
        before: Called before each sample, outside the clock.
    """
    for step in variants.values():
        for _ in range(warmup):
            step()
    synchronize(device)
    timings = {name: Timing([], []) for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            if before is not None:
                before()
            synchronize(device)
            if dist.is_initialized():
                dist.barrier()
            ms, host_ms = _sample(step, device, iterations)
            timings[name].ms.append(ms)
            timings[name].host_ms.append(host_ms)
    for timing in timings.values():
        timing.ms = _slowest(timing.ms, device)
        timing.host_ms = _slowest(timing.host_ms, device)
    return timings


def _sample(step: Callable[[], object], device: torch.device, iterations: int) -> tuple[float, float]:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        ms = (time.perf_counter() - start) * 1e3 / iterations
        return ms, ms
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    host = (time.perf_counter() - start) * 1e3 / iterations
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / iterations, host


def _slowest(samples: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return samples
    on = device if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.tensor(samples, dtype=torch.float64, device=on)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(x) for x in tensor.tolist()]


def host_time(step: Callable[[], object], device: torch.device, *, rounds: int = 20, iterations: int = 1) -> float:
    """Median milliseconds of host time that one `step` takes to queue, from an idle device."""
    samples = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        samples.append((time.perf_counter() - start) * 1e3 / iterations)
        synchronize(device)
    return statistics.median(samples)


def peak_memory(step: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes of device memory allocated during one step, what lives outside of it included; None on CPU."""
    if device.type != "cuda":
        step()
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


# -- results -------------------------------------------------------------------------------------------------------


def bytes_outside(transport: object) -> int:
    """Bytes that a transport holds outside of torch's allocator: peer memory, and what lies around mapped shards."""
    return sum(getattr(transport, name, 0) for name in ("symmetric_bytes", "mapped_bytes"))


def significant(value: float) -> float:
    """Five digits, whatever the size: a ratio of 0.08 is then as exact as one of 0.8."""
    return float(f"{value:.5g}")


def rows_of(
    case: str,
    mode: str,
    timings: Mapping[str, Timing],
    *,
    reference: str,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """One row per variant; `ratio` is the reference's median over the row's, from this very run."""
    base = timings[reference].median
    rows = []
    for name, timing in timings.items():
        row: dict[str, Any] = {
            "case": case,
            "impl": name,
            "mode": mode,
            "ms": significant(timing.median),
            "ms_min": significant(min(timing.ms)),
            "ms_max": significant(max(timing.ms)),
            "host_ms": significant(statistics.median(timing.host_ms)),
            "ratio": significant(base / timing.median),
            "samples": len(timing.ms),
        }
        row.update((extra or {}).get(name, {}))
        rows.append(row)
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    versions: dict[str, Any] = {}
    for package in ("triton", "megatron-core", "transformer-engine", "cuda-bindings"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        **versions,
    }


def command() -> str:
    """The command line that reproduces this run."""
    return shlex.join(["python", "-m", f"benchmarks.{pathlib.Path(sys.argv[0]).stem}", *sys.argv[1:]])


def write(
    name: str, device: torch.device, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, **fields: Any
) -> None:
    """Writes the result file on the first rank. `fields` are added at its top level."""
    if not is_main():
        return
    path = args.out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "command": getattr(args, "command", None) or command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "environment": environment(device),
        **fields,
        "rows": list(rows),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text; a missing value is a dash."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells), 1) for i, column in enumerate(columns)]
    lines = ["  ".join(column.ljust(w) for column, w in zip(columns, widths, strict=True)).rstrip()]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def plot_losses(losses: Mapping[str, Sequence[float]], path: pathlib.Path, title: str) -> None:
    """One line per variant, three at most; those that coincide lie dashed and dotted over each other."""
    try:
        import matplotlib
    except ImportError:
        say("matplotlib is not installed: no plot of the loss curves")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, values), (style, width) in zip(losses.items(), (("-", 3.0), ("--", 1.8), (":", 1.4)), strict=False):
        axes.plot(values, style, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)

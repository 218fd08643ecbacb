"""Host cost of one consume: schedule, lease and dispatch, with a transport that moves nothing.

A stack of bias-free Linear layers of width 8 on the CPU, forward and backward: the arithmetic is next to nothing, so a
step is the host's work. A second rank is simulated by torch's fake process group; nothing waits for anybody. What a
consume costs is (sharded step - plain step) / consumes of the step, where a step has two consumes and one finalize per
layer; the finalize is counted to the consumes.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtp
from benchmarks import common
from gtp.testing.null_transport import NullTransport

WIDTH = 8


def stack(layers: int, *, sharded: bool, linear: type[nn.Linear] = nn.Linear) -> tuple[nn.Module, Any]:
    """A stack of Linear layers and, if sharded, its runtime."""
    torch.manual_seed(0)
    model = nn.Sequential(*[linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    runtime = gtp.shard_model(model, dist.group.WORLD, transport=NullTransport()) if sharded else None
    return model, runtime


def step_of(model: nn.Module) -> Any:
    x = torch.randn(4, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            torch.Tensor.grad.__set__(parameter, None)

    return step


def measure(layers: int, rounds: int) -> dict[str, Any]:
    """Medians of a plain and a sharded step, in turns, and what a consume costs."""
    plain, _ = stack(layers, sharded=False)
    sharded, runtime = stack(layers, sharded=True)
    device = torch.device("cpu")
    timings = common.interleave(
        {"nn.Linear": step_of(plain), "gtp": step_of(sharded)}, device, rounds=rounds, warmup=5, iterations=2
    )
    before = runtime.stats()
    step_of(sharded)()
    consumes = runtime.stats().consumes - before.consumes
    differences = [(g - p) * 1e3 / consumes for g, p in zip(timings["gtp"].ms, timings["nn.Linear"].ms, strict=True)]
    rows = common.rows_of(f"{layers} linears", "eager", timings, reference="nn.Linear")
    return {
        "layers": layers,
        "consumes": consumes,
        "us_per_consume": statistics.median(differences),
        "us_per_consume_min": min(differences),
        "us_per_consume_max": max(differences),
        "hit_rate": runtime.stats().hit_rate,
        "rows": rows,
    }


def main() -> None:
    parser = common.parser(__doc__ or "")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    rounds = 20 if args.quick else 60
    sizes = (8, 16) if args.tiny else (32, 64, 512)
    results = [measure(layers, max(rounds * 64 // max(layers, 64), 8)) for layers in sizes]
    rows = [
        {**row, "us_per_consume": round(r["us_per_consume"], 2), "hit_rate": r["hit_rate"]}
        for r in results
        for row in r["rows"]
    ]
    for r in results:
        print(
            f"{r['layers']:4d} linears: {r['us_per_consume']:6.1f} us per consume "
            f"({r['us_per_consume_min']:.1f} to {r['us_per_consume_max']:.1f}), hit rate {r['hit_rate']:.3f}"
        )
    common.write("host_overhead", torch.device("cpu"), rows, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

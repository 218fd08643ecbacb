"""Host cost of one consume: schedule, lease and dispatch, with a transport that moves nothing.

A stack of bias-free Linear layers of width 8 on the CPU: the arithmetic is next to nothing, so a step is the host's
work. A second rank is simulated by torch's fake process group; nothing waits for anybody. Three numbers:

consume   One `materialize_weight_for_forward`, the full weight let go at once: dispatch, schedule, lease, prefetch.
in a step (Sharded step - plain step) / consumes of the step. A step, forward and backward, has two consumes and one
          finalize per layer, and enters the op and its autograd function; all of that is counted to the consumes.
AdamW     A step over 64 shards [128, 256], against the same step over plain tensors of that shape.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import statistics
import sys
import time
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
from gtp.protocol import materialize_weight_for_forward
from gtp.testing.null_transport import NullTransport

WIDTH = 8
OPTIMIZED = (64, 256)  # weights of an optimizer step, and their width


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
            parameter.grad = None

    return step


def consumes_alone(model: nn.Module, runtime: Any, rounds: int) -> list[float]:
    """Microseconds of one consume, per pass over all weights."""
    weights = [module.weight for module in model]  # type: ignore[union-attr]
    samples = []
    for _ in range(rounds + 5):
        with torch.no_grad():
            runtime.enter_forward()
            start = time.perf_counter()
            for weight in weights:
                materialize_weight_for_forward([weight])
            samples.append((time.perf_counter() - start) / len(weights) * 1e6)
            runtime.exit_forward()
    return samples[5:]


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
    alone = consumes_alone(sharded, runtime, 4 * rounds)
    rows = common.rows_of(f"{layers} linears", "eager", timings, reference="nn.Linear")
    return {
        "layers": layers,
        "consumes": consumes,
        "us_per_consume": statistics.median(alone),
        "us_per_consume_min": min(alone),
        "us_per_consume_max": max(alone),
        "us_per_consume_in_a_step": statistics.median(differences),
        "us_per_consume_in_a_step_min": min(differences),
        "us_per_consume_in_a_step_max": max(differences),
        "hit_rate": runtime.stats().hit_rate,
        "rows": rows,
    }


def optimizer_step(weights: list[torch.Tensor], options: dict[str, bool]) -> Any:
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    return torch.optim.AdamW(weights, lr=1e-3, **options).step


def measure_optimizers(rounds: int) -> list[dict[str, Any]]:
    """Steps of AdamW over shards and over plain tensors of the same shape, in turns."""
    count, width = OPTIMIZED
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    runtime = gtp.shard_model(model, dist.group.WORLD, transport=NullTransport())
    shards = list(model.parameters())
    plain = [nn.Parameter(torch.randn(width // 2, width)) for _ in range(count)]
    rows = []
    for name, options in [("fused", {"fused": True}), ("foreach", {"foreach": True}), ("for-loop", {"foreach": False})]:
        steps = {"plain": optimizer_step(plain, options), "gtp": optimizer_step(shards, options)}
        timings = common.interleave(steps, runtime.device, rounds=rounds, warmup=5, iterations=2)
        rows += common.rows_of(f"AdamW {name}, {count} shards", "eager", timings, reference="plain")
        print(f"AdamW {name}: {timings['plain'].median:.2f} ms plain, {timings['gtp'].median:.2f} ms of shards")
    return rows


def main() -> None:
    parser = common.parser(__doc__ or "")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    rounds = 20 if args.quick else 60
    sizes = (8, 16) if args.tiny else (32, 64, 512)
    results = [measure(layers, max(rounds * 64 // max(layers, 64), 8)) for layers in sizes]
    rows = [
        {
            **row,
            **{key: round(value, 2) for key, value in r.items() if key.startswith("us_")},
            "hit_rate": r["hit_rate"],
        }
        for r in results
        for row in r["rows"]
    ]
    for r in results:
        alone, in_a_step = (
            f"{r[key]:6.1f} us ({r[key + '_min']:.1f} to {r[key + '_max']:.1f})"
            for key in ("us_per_consume", "us_per_consume_in_a_step")
        )
        print(f"{r['layers']:4d} linears: {alone} per consume, {in_a_step} in a step, hit rate {r['hit_rate']:.3f}")
    rows += measure_optimizers(rounds)
    common.write("host_overhead", torch.device("cpu"), rows, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Where the host's time of an eager step goes, on the stack of `benchmarks.step`.

    python -m benchmarks.host_step             one rank per GPU; on one GPU: --ranks 2
    python -m benchmarks.host_step --device cpu --tiny

unsharded        The stack as it is.
functions        The same, each linear an autograd function in Python that does its GEMMs and nothing else: what any
                 sharding in Python starts from.
gtp, no wire     Sharded, with a transport that moves nothing: gtp's Python, and an event for each buffer that is free
                 again. Its products are worthless.
gtp              Sharded. With the copy engine, `driver` says how often CUDA's driver is called in a step, and how long
                 the calls take; measured in other steps, which the clock around each call makes slower.

`host_ms` is the host's time until a step is queued, and all that counts where ranks share a GPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from benchmarks import common
from benchmarks.models import LLAMA, TINY, make_stack
from benchmarks.step import rounds_of, step_of
from gtp.ops.peer import CudaDriver, Driver
from gtp.runtime.copy_engine import CopyEngineTransport
from gtp.testing.null_transport import NullTransport


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(dy, weight), torch.mm(dy.t(), x)


class _FunctionLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return y


class _TimedDriver:
    """A `Driver` that notes how often each of its calls is made, and for how many seconds."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.calls: defaultdict[str, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._driver, name)
        seconds = self.calls[name]

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        setattr(self, name, timed)
        return timed


def _call_functions(stack: nn.Module) -> int:
    """Makes the linears of a stack `_FunctionLinear`, and counts them."""
    linears = [module for module in stack.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        module.__class__ = _FunctionLinear
    return len(linears)


def driver_calls(
    step: Callable[[], None], driver: _TimedDriver, device: torch.device, steps: int
) -> dict[str, dict[str, float]]:
    """Per call of the driver, how often it is made in a step and the milliseconds of a step that it takes."""
    for _ in range(3):
        step()
    for seconds in driver.calls.values():
        seconds.clear()
    for _ in range(steps):
        common.synchronize(device)
        dist.barrier()
        step()
    return {
        name: {"calls": len(seconds) / steps, "ms": common.significant(sum(seconds) / steps * 1e3)}
        for name, seconds in driver.calls.items()
        if seconds
    }


def run(device: torch.device, args: argparse.Namespace) -> None:
    """On every rank."""
    sizes = TINY if args.tiny else LLAMA
    tokens = args.tokens
    cuda = device.type == "cuda"

    def sharded(transport: Any = None) -> nn.Module:
        stack = make_stack(sizes, device)
        if transport is not None:
            gtp.shard_model(stack, dist.group.WORLD, transport=transport)
        else:
            name = "copy_engine" if cuda else "process_group"
            gtp.shard_model(stack, dist.group.WORLD, config=gtp.GTPConfig(transport=name))
        return stack

    models = {"unsharded": make_stack(sizes, device), "functions": make_stack(sizes, device)}
    linears = _call_functions(models["functions"])
    models["gtp, no wire"] = sharded(NullTransport())
    models["gtp"] = sharded()
    steps = {name: step_of(model, sizes, tokens, device)[0] for name, model in models.items()}
    timings = common.interleave(steps, device, rounds=rounds_of(args), warmup=5)
    rows = common.rows_of(f"llama {tokens}", "eager", timings, reference="unsharded")
    for row, timing in zip(rows, timings.values(), strict=True):
        row.update(linears=linears, host_ms_min=common.significant(min(timing.host_ms)))
        row["host_ms_max"] = common.significant(max(timing.host_ms))
    del models, steps
    gc.collect()
    if cuda:
        driver = _TimedDriver(CudaDriver(device))
        model = sharded(CopyEngineTransport(device, driver=driver))  # type: ignore[arg-type]  # it has all calls
        step = step_of(model, sizes, tokens, device)[0]
        rows[-1]["driver"] = driver_calls(step, driver, device, rounds_of(args))
    common.say(common.table(rows, ["case", "impl", "host_ms", "host_ms_min", "host_ms_max"]))
    common.write("host_step", device, rows, args)


def main() -> None:
    parser = common.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    common.launch(run, parser.parse_args())


if __name__ == "__main__":
    main()

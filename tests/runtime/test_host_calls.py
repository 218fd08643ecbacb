"""What gtp costs the host, counted in calls of its own Python functions: exact, and blind to how busy the machine is.

The numbers are what the code needs today. Whoever adds a call to a consume or an optimizer step says why, and raises
the number; whoever takes some away lowers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.null_transport import NullTransport

_HOME = str(Path(gtp.__file__).parent)
_WIDTH = 8


def _calls(function: Callable[[], object]) -> int:
    """How many Python functions of gtp run in `function`, those of a stand-in for the wire left out."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and name.startswith(_HOME) and not name.startswith(f"{_HOME}/testing")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def _stack(layers: int) -> tuple[nn.Module, gtp.GTPRuntime]:
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)])
    return model, gtp.shard_model(model, dist.group.WORLD, transport=NullTransport())


def _calls_of_a_step(layers: int) -> tuple[int, int]:
    """Calls in forward and backward of a step whose schedule is learned, and its consumes."""
    model, runtime = _stack(layers)
    x = torch.randn(4, _WIDTH)

    def step() -> None:
        model(x).sum().backward()

    for _ in range(10):  # until every weight has been in every buffer that it comes to
        step()
        model.zero_grad()
    before = runtime.stats()
    calls = _calls(step)
    after = runtime.stats()
    consumes = after.consumes - before.consumes
    assert after.prefetch_hits - before.prefetch_hits >= consumes - 1
    return calls, consumes


def _calls_of_an_optimizer_step(layers: int, options: dict[str, bool]) -> int:
    model, _ = _stack(layers)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(4, _WIDTH)).sum().backward()
    for _ in range(2):
        optimizer.step()
    return _calls(optimizer.step)


def _per_consume() -> float:
    (few, few_consumes), (many, many_consumes) = (_calls_of_a_step(layers) for layers in (8, 40))
    return (many - few) / (many_consumes - few_consumes)


def test_calls_per_consume_in_a_whole_step(ranks: object) -> None:
    """A layer has two consumes, for which the op and half of a reduction each are counted as well."""
    assert max(ranks(2).run(_per_consume)) <= 62  # type: ignore[operator]


def _per_weight(options: dict[str, bool]) -> float:
    few, many = (_calls_of_an_optimizer_step(layers, options) for layers in (8, 40))
    return (many - few) / 32


@pytest.mark.parametrize(("options", "most"), [({"fused": True}, 7), ({"foreach": True}, 9), ({"foreach": False}, 144)])
def test_calls_per_weight_in_a_step_of_adamw(ranks: object, options: dict[str, bool], most: int) -> None:
    """Fused and multi-tensor ones are judged list by list, so a weight more costs what asking for its gradient does."""
    assert max(ranks(2).run(_per_weight, options)) <= most  # type: ignore[operator]

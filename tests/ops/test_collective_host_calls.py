"""What a collective GEMM by peer copies costs the host: calls of the driver, of torch's GEMMs, of gtp's own functions.

Counted, with a driver that does nothing, so exact and blind to how busy the machine is. The numbers are what the code
needs today. Whoever adds a call says why, and raises the number; whoever takes some away lowers it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import gtp
from gtp.ops import all_gather_linear, linear_reduce_scatter
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend
from gtp.ops.peer import SignalOp
from tests.ops.copy_engine_ranks import CPU, sizes
from tests.runtime.simulated_streams import FakeGroup

_HOME = str(Path(gtp.__file__).parent)


class _IdleDriver:
    """Counts what would be calls of libcuda."""

    def __init__(self) -> None:
        self.handles = 0
        self.calls: Counter[str] = Counter()

    def new_stream(self, *, urgent: bool = True) -> int:
        self.handles += 1
        return self.handles

    def new_event(self) -> int:
        return self.new_stream()

    def current_stream(self) -> int:
        return 0

    def capture(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> None:
        self.calls["record"] += 1

    def wait_event(self, stream: int, event: int) -> None:
        self.calls["wait"] += 1

    def copy(self, *_: int) -> None:
        self.calls["copy"] += 1

    def copy_rows(self, *_: int) -> None:
        self.calls["copy rows"] += 1

    def batch(self, ops: Sequence[SignalOp]) -> Any:
        return ops

    def submit(self, batch: Any, stream: int) -> None:
        self.calls["submit"] += 1


def _backend(size: int) -> tuple[CopyEngineBackend, _IdleDriver]:
    def arena(nbytes: int, group: object) -> Any:
        local = torch.zeros(nbytes, dtype=torch.uint8)
        return SimpleNamespace(local=local, pointers=[local.data_ptr()] * size)

    driver, group = _IdleDriver(), FakeGroup("tp", range(size), 0)
    backend = CopyEngineBackend(group, CPU, driver=driver, make_arena=arena)  # type: ignore[arg-type]
    backend._agreement = None  # there is no store
    return backend, driver


def _count(step: Callable[[], object]) -> tuple[int, int]:
    """Python functions of gtp that run in `step`, and products."""
    calls = products = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, products
        calls += event == "call" and frame.f_code.co_filename.startswith(_HOME)
        products += event == "c_call" and argument is torch.mm

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls, products


_EVENTS = {"record", "wait"}


@pytest.mark.parametrize("size, gathers, backward, split, most, products, signals, copies, events", [
    (2, False, False, False, 22, 1, 3, 1, 0),
    (2, True, False, False, 30, 1, 3, 2, 0),
    (4, False, False, False, 22, 1, 3, 4, 0),
    (4, True, False, False, 30, 1, 3, 4, 0),
    (2, False, True, False, 65, 3, 6, 3, 0),
    (2, True, True, False, 94, 4, 9, 5, 4),  # forward keeps columns, whose copies are a stream's of their own
    (2, False, False, True, 37, 2, 3, 1, 6),
    (2, True, False, True, 40, 2, 3, 1, 6),
])  # fmt: skip
def test_host_calls_of_an_operation(size, gathers, backward, split, most, products, signals, copies, events):
    """`events`: records and waits. Short ones are in the order of the current stream, and need none."""
    backend, driver = _backend(size)
    rows, k, n = 16, 8, 8
    x = torch.randn(rows // size if gathers else rows, k, requires_grad=True)
    weight = torch.randn(n, k, requires_grad=True)
    dy = torch.randn(rows if gathers else rows // size, n)
    op = all_gather_linear if gathers else linear_reduce_scatter

    def step() -> None:
        with torch.set_grad_enabled(backward):
            y = op(x, weight, backend=backend)
        if backward:
            torch.autograd.backward(y, dy)

    with sizes(split=split):
        for _ in range(4):  # until every slot has been used
            step()
        driver.calls.clear()
        calls, multiplied = _count(step)
    assert driver.calls["submit"] == signals
    assert driver.calls["copy"] + driver.calls["copy rows"] == copies
    assert sum(driver.calls[each] for each in _EVENTS) == events
    assert multiplied == products
    assert calls <= most

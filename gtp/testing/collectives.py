"""Tools that make races and order visible, used inside a rank: late, logged and delayed collectives.

They replace the entry points of `torch.distributed` as module attributes for as long as a `with` block lasts, so they
see code that calls `torch.distributed.all_reduce(...)` or `dist.all_reduce(...)`, and not code that imported the
function itself before. They nest, and they follow async collectives issued inside torch's coalescing manager, which
complete at the manager's `wait`.

CPU runs hide races, since gloo has most often ended before anybody looks: `late_collectives` is what makes a test of
overlap mean something there.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import GTPError
from gtp.testing.interception import KINDS, Call, manager_hooks, replaced_entry_points

__all__ = [
    "KINDS",
    "CollectiveLog",
    "CollectiveRecord",
    "RaceError",
    "collective_log",
    "delayed_collectives",
    "late_collectives",
]


class RaceError(GTPError, AssertionError):
    """`late_collectives` saw memory of a collective in flight change, or a collective that nobody waited for."""


# --- late


class _InFlight:
    """One async collective whose result is held back in a shadow until somebody waits."""

    def __init__(self, call: Call) -> None:
        self.text = call.describe()
        self.writes = call.writes
        # each input with its value at the start, which is also what travels
        self.reads = [(t, t.detach().clone()) for t in call.reads if not call.in_place]
        self.shadows = [t.detach().clone() for t in self.writes]
        self.result = call.issue([*zip(self.writes, self.shadows, strict=True), *self.reads])
        for t in self.writes:
            _poison(t)
        self.poisoned = [t.detach().clone() for t in self.writes]
        self.done = False

    def land(self) -> None:
        """The result arrives. The real collective is complete, in the order of the current stream."""
        if self.done:
            return
        self.done = True
        for t, before in self.reads:
            # an input that is a slice of the output was poisoned with it, and rightly so
            if not any(_overlap(t, out) for out in self.writes) and not _same_bytes(t, before):
                raise RaceError(f"{self.text}: its input changed while it was in flight")
        for t, poisoned in zip(self.writes, self.poisoned, strict=True):
            if not _same_bytes(t, poisoned):
                raise RaceError(f"{self.text}: its output was written by somebody else while it was in flight")
        for t, shadow in zip(self.writes, self.shadows, strict=True):
            t.detach().copy_(shadow)
        # a test of memory must not count what only this tool holds
        self.reads, self.writes, self.shadows, self.poisoned, self.result = [], [], [], [], None


class _LateWork(dist.Work):
    # a dist.Work, or some callers would not wait for it
    def __init__(self, work: dist.Work, flight: _InFlight) -> None:
        super().__init__()
        self._work = work
        self._flight = flight

    def wait(self, timeout: Any = None) -> bool:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        self._flight.land()
        return True

    def is_completed(self) -> bool:
        return self._flight.done


@contextmanager
def late_collectives() -> Iterator[None]:
    """Async collectives deliver their result at `wait()`, never earlier; until then their output is NaN.

    While a collective is in flight its output holds NaN (integers: the largest value), so whoever reads early computes
    NaN. At `wait()` the input must still hold what it held at the start and the output must still be untouched.
    Synchronous collectives pass through.

    Raises:
        RaceError: at `wait()`, when an input or an output changed in flight; at the end of the block, when
            a collective was started and never waited for.
    """
    flights: list[_InFlight] = []
    entered: list[_InFlight] = []  # inside a coalescing block that has not ended
    by_manager: weakref.WeakKeyDictionary[Any, list[_InFlight]] = weakref.WeakKeyDictionary()

    def start(call: Call) -> Any:
        if not call.async_op:
            return call.issue()
        if not call.coalesced:
            _must_be_empty(entered)
        flights[:] = [f for f in flights if not f.done]
        flight = _InFlight(call)
        flights.append(flight)
        if call.coalesced:
            entered.append(flight)
            return flight.result
        return _LateWork(flight.result, flight)

    def left(manager: Any) -> None:
        by_manager[manager] = entered.copy()
        entered.clear()

    def waited(manager: Any) -> None:
        for flight in by_manager.pop(manager, []):
            flight.land()

    with replaced_entry_points(KINDS, start), manager_hooks(left, waited):
        yield
        _must_be_empty(entered)
        if open_flights := [f.text for f in flights if not f.done]:
            raise RaceError(
                f"{len(open_flights)} collectives were started and never waited for, first {open_flights[0]}: "
                "their buffers may be reused while they are written"
            )


def _must_be_empty(entered: list[_InFlight]) -> None:
    if entered:
        raise RaceError(
            f"{entered[0].text}: async_op=True inside a synchronous coalescing manager, whose end nobody can wait for: "
            "pass async_op=False, or async_ops=True to the manager"
        )


def _poison(t: torch.Tensor) -> None:
    with torch.no_grad():
        if t.dtype.is_floating_point or t.dtype.is_complex:
            t.fill_(float("nan"))
        elif t.dtype == torch.bool:
            t.fill_(True)
        else:
            t.fill_(torch.iinfo(t.dtype).max)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality to which NaN is equal to itself."""
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


# --- logged


@dataclasses.dataclass(frozen=True)
class CollectiveRecord:
    """One event of a `CollectiveLog`.

    Attributes:
        event: "start", "wait" (the wait of an async one has returned), or "mark".
        kind: Name of the entry point; of a mark: its text. The wait of a coalesced block is one event, of its first
            kind.
        shape: Shape of the output on this rank; of a list, of its first tensor.
        input_shape: Shape of the input on this rank.
        dtype: Dtype of the input, hence of the wire.
        group: Global ranks of the group.
        async_op: Whether it was started asynchronously.
        coalesced: Whether it was issued inside a coalescing manager.
    """

    event: str
    kind: str
    shape: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    group: tuple[int, ...] = ()
    async_op: bool = False
    coalesced: bool = False


class CollectiveLog:
    """What `collective_log` saw, in order.

    Attributes:
        records: All events.
    """

    def __init__(self) -> None:
        self.records: list[CollectiveRecord] = []

    def mark(self, text: str) -> None:
        """Puts a line of your own between the collectives, from a forward hook for instance."""
        self.records.append(CollectiveRecord("mark", text))

    def started(self, kind: str | None = None) -> list[CollectiveRecord]:
        """The collectives in order of start, of one kind or of all."""
        return [r for r in self.records if r.event == "start" and kind in (None, r.kind)]

    def lines(self) -> list[str]:
        """One short line an event, to compare whole orders: "start all_reduce (4, 8)", "wait all_reduce (4, 8)"."""
        return [f"{r.event} {r.kind}" if r.event == "mark" else f"{r.event} {r.kind} {r.shape}" for r in self.records]


class _LoggedWork(dist.Work):
    def __init__(self, work: dist.Work, waited: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._waited = waited

    def wait(self, timeout: Any = None) -> bool:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        self._waited()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


@contextmanager
def collective_log() -> Iterator[CollectiveLog]:
    """Records every collective of the entry points in `KINDS`, and when async ones are waited for."""
    log = CollectiveLog()
    entered: list[CollectiveRecord] = []
    by_manager: weakref.WeakKeyDictionary[Any, CollectiveRecord] = weakref.WeakKeyDictionary()

    def waited(record: CollectiveRecord) -> None:
        log.records.append(dataclasses.replace(record, event="wait"))

    def start(call: Call) -> Any:
        source = call.reads[0]
        record = CollectiveRecord(
            "start",
            call.kind,
            tuple(call.writes[0].shape),
            tuple(source.shape),
            source.dtype,
            tuple(dist.get_process_group_ranks(call.group)),
            call.async_op,
            call.coalesced,
        )
        log.records.append(record)
        work = call.issue()
        if not call.async_op:
            return work
        if record.coalesced:
            entered.append(record)
            return work
        return _LoggedWork(work, functools.partial(waited, record))

    def left(manager: Any) -> None:
        if entered:
            by_manager[manager] = entered[0]
            entered.clear()

    def manager_waited(manager: Any) -> None:
        record = by_manager.pop(manager, None)
        if record is not None:
            waited(record)

    with replaced_entry_points(KINDS, start), manager_hooks(left, manager_waited):
        yield log


# --- delayed


@contextmanager
def delayed_collectives(seconds: float, *, rank: int, kinds: Collection[str] = KINDS) -> Iterator[None]:
    """One rank comes late to each collective of these kinds: it sleeps before it issues one.

    Args:
        seconds: How long, per collective.
        rank: Global rank that is late. The others run unchanged.
        kinds: Entry points, of `KINDS`.

    Raises:
        GTPValueError: a kind that is not in `KINDS`.
    """

    def start(call: Call) -> Any:
        if dist.get_rank() == rank:
            time.sleep(seconds)
        return call.issue()

    with replaced_entry_points(kinds, start):
        yield

"""Simulated CUDA streams, events, peer memory and graphs for several ranks in one process, in random order.

A `Machine` holds what all ranks have queued. `run` executes one operation at a time, and at each turn any operation
may come next that its stream, its events and its flags allow. So a run under one seed is one of the orders that real
devices could take, and a protocol that survives many seeds does not rest on luck. If nothing may run and something is
queued, that is a deadlock, and the run says what each rank waits for.

`serial=True` is the other extreme: each rank has one hardware queue and runs in the order of queueing; graphs run in
one arbitrary topological order, front to back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gtp.ops.peer import Block, Mapping, PagedArena, SignalOp, Wait
from gtp.testing.host_pages import HostPages


@dataclasses.dataclass(eq=False)
class Operation:
    """One thing on a stream."""

    what: str
    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    after: list[Operation] = dataclasses.field(default_factory=list)  # within a graph
    stream: int = 0  # likewise


@dataclasses.dataclass(eq=False)
class Graph:
    """Captured operations, with their dependencies."""

    nodes: list[Operation]


class _Replay:
    """A graph on its way: what is left of it, and what of that waits for no other node."""

    def __init__(self, nodes: list[Operation]) -> None:
        self.pending = dict.fromkeys(nodes)
        self._missing = {node: len(node.after) for node in nodes}
        self._dependents: dict[Operation, list[Operation]] = {node: [] for node in nodes}
        for node in nodes:
            for dependency in node.after:
                self._dependents[dependency].append(node)
        self.free = [node for node in nodes if not node.after]

    def finish(self, node: Operation) -> None:
        del self.pending[node]
        self.free.remove(node)
        for dependent in self._dependents[node]:
            self._missing[dependent] -= 1
            if not self._missing[dependent]:
                self.free.append(dependent)


@dataclasses.dataclass(eq=False)
class _Capture:
    identifier: int
    tails: dict[int, Operation | None]
    nodes: list[Operation] = dataclasses.field(default_factory=list)
    events: dict[int, Operation | None] = dataclasses.field(default_factory=dict)


class Deadlock(Exception):
    """Nothing may run."""


class Machine:
    """All ranks' queues. Queue everything first, then `run`."""

    def __init__(self, ranks: int, *, serial: bool = False) -> None:
        self.ranks = ranks
        self.serial = serial
        self.queues: dict[tuple[int, int], deque[Operation | _Replay]] = {}
        self.recorded: dict[int, int] = {}
        self.completed: set[tuple[int, int]] = set()  # of the records of an event, each for itself
        self.records = 0
        self.executed = 0
        self._arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.pages = LastingPages()
        self._paged: dict[str, list[list[Block]]] = {}
        self._handles = 0

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    def arena(self, nbytes: int, group: FakeGroup, made: int) -> list[torch.Tensor]:
        """The blocks of all ranks of a group, for the `made`-th arena over it."""
        key = (group.group_name, made)
        if key not in self._arenas:
            self._arenas[key] = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(group.size())]
        assert self._arenas[key][0].numel() == nbytes, "ranks disagree on an arena's size"
        return self._arenas[key]

    def paged_arena(self, sizes: Sequence[int], group: FakeGroup, pages: HostPages) -> tuple[PagedArena, None]:
        """As `gtp.ops.peer.make_paged_arena`, with all ranks in one process. Made once per group."""
        made = self._paged.setdefault(
            group.group_name, [[Block(pages, nbytes) for nbytes in sizes] for _ in range(group.size())]
        )
        peers = {rank: Mapping(pages, blocks) for rank, blocks in enumerate(made)}
        own = peers.pop(group.rank())
        return PagedArena(own.blocks, own, peers, group.size()), None

    def run(self, seed: int, *, ahead: int | None = None, starved: Collection[int] = ()) -> None:
        """Executes everything that is queued.

        Args:
            seed: Of the order.
            ahead: A rank that runs as far as it can before any other gets a turn.
            starved: Streams that get a turn when no other may run.
        """
        order = random.Random(seed)
        while True:
            runnable = {
                key: found for key, queue in self.queues.items() if queue and (found := self._runnable(queue, order))
            }
            if not runnable:
                if any(self.queues.values()):
                    raise Deadlock(self._where())
                return
            ours = {key: found for key, found in runnable.items() if key[0] == ahead} or runnable
            fed = [
                c
                for (_, stream), found in ours.items()
                for c in found
                if stream not in starved and c[1].stream not in starved
            ]
            queue, operation = order.choice(fed or [c for found in ours.values() for c in found])
            head = queue[0]
            operation.run()
            self.executed += 1
            if isinstance(head, _Replay):
                head.finish(operation)
                if not head.pending:
                    queue.popleft()
            else:
                queue.popleft()

    def _runnable(self, queue: deque[Operation | _Replay], order: random.Random) -> list[tuple[Any, Operation]]:
        head = queue[0]
        if isinstance(head, Operation):
            return [(queue, head)] if head.ready() else []
        nodes = [next(iter(head.pending))] if self.serial else head.free
        return [(queue, n) for n in nodes if n.ready()]

    def _where(self) -> str:
        lines = []
        for (rank, stream), queue in sorted(self.queues.items()):
            if queue:
                head = queue[0]
                what = head.what if isinstance(head, Operation) else f"graph: {[n.what for n in head.free[:8]]}"
                lines.append(f"rank {rank} stream {stream}: {what} (and {len(queue) - 1} more)")
        return "\n".join(lines)


class LastingPages(HostPages):
    """What is queued when a mapping goes may use it until the end, as a device does that is not waited for."""

    def retire(self, address: int, mapped: int, nbytes: int) -> None:
        pass


class FakeGroup:
    """As much of a process group as the transport asks for."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.group_name = name
        self._ranks = list(ranks)
        self._rank = rank

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def size(self) -> int:
        return len(self._ranks)


@dataclasses.dataclass
class _Arena:
    local: torch.Tensor
    pointers: Sequence[int]


class SimulatedDriver:
    """A `Driver` of one rank."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.rank = rank
        self.main = machine.handle()
        self._capture: _Capture | None = None
        self._made: dict[str, int] = {}

    # -- Driver --------------------------------------------------------------------------------------------------

    def new_stream(self, *, urgent: bool = True) -> int:
        return self.machine.handle()

    def new_event(self) -> int:
        return self.machine.handle()

    def current_stream(self) -> int:
        return self.main

    def capture(self) -> int:
        return 0 if self._capture is None else self._capture.identifier

    def record(self, event: int, stream: int) -> None:
        if self._capture is not None and stream in self._capture.tails:
            self._capture.events[event] = self._capture.tails[stream]
            self.machine.recorded[event] = -1
            return
        machine = self.machine
        machine.records += 1
        machine.recorded[event] = generation = machine.records
        self.queue(Operation(f"record {event}", lambda: machine.completed.add((event, generation))), stream)

    def wait_event(self, stream: int, event: int) -> None:
        capture, generation = self._capture, self.machine.recorded.get(event, 0)
        if capture is not None and event in capture.events:
            tail = capture.events[event]
            node = Operation(f"join {event}", lambda: None)
            node.after = [n for n in (tail, capture.tails.get(stream)) if n is not None]
            capture.nodes.append(node)
            capture.tails[stream] = node
            return
        assert generation >= 0, "an event that was recorded in a capture is waited for outside of it"
        assert capture is None or stream not in capture.tails, "a captured stream waits for an event from before"
        completed, record = self.machine.completed, (event, generation)
        self.queue(Operation(f"wait {event}", lambda: None, lambda: generation == 0 or record in completed), stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        # In two pieces, so that a read in the middle of a write is seen
        half = nbytes // 2
        for start, count in ((0, half), (half, nbytes - half)):
            self.queue(
                Operation(f"copy {count}", lambda s=start, n=count: ctypes.memmove(dst + s, src + s, n)),
                stream,
            )

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        for row in range(rows):
            to, of = dst + row * dst_pitch, src + row * src_pitch
            self.queue(Operation(f"copy {width}", lambda to=to, of=of: ctypes.memmove(to, of, width)), stream)

    def batch(self, ops: Sequence[SignalOp]) -> list[SignalOp]:
        return list(ops)

    def submit(self, batch: list[SignalOp], stream: int) -> None:
        for op in batch:
            word = ctypes.c_int32.from_address(op.address)
            if isinstance(op, Wait):
                self.queue(
                    Operation(f"flag at {op.address}", lambda: None, lambda w=word, v=op.value: w.value == v), stream
                )
            else:
                self.queue(Operation("write", lambda w=word, v=op.value: setattr(w, "value", v)), stream)

    # -- for tests -----------------------------------------------------------------------------------------------

    def queue(self, operation: Operation, stream: int) -> None:
        capture = self._capture
        if capture is not None and stream in capture.tails:
            tail = capture.tails[stream]
            operation.after = [] if tail is None else [tail]
            operation.stream = stream
            capture.nodes.append(operation)
            capture.tails[stream] = operation
            return
        key = (self.rank, 0 if self.machine.serial else stream)
        self.machine.queues.setdefault(key, deque()).append(operation)

    def compute(self, run: Callable[[], object], what: str = "compute") -> None:
        """Something on the current stream."""
        self.queue(Operation(what, run), self.main)

    def make_arena(self, nbytes: int, group: FakeGroup) -> _Arena:
        made = self._made.get(group.group_name, 0)
        self._made[group.group_name] = made + 1
        blocks = self.machine.arena(nbytes, group, made)
        return _Arena(blocks[group.rank()], [block.data_ptr() for block in blocks])

    def begin_capture(self) -> None:
        self._capture = _Capture(self.machine.handle(), {self.main: None})

    @property
    def captured(self) -> list[Operation]:
        """What the running capture holds so far."""
        return [] if self._capture is None else self._capture.nodes

    def end_capture(self) -> Graph:
        capture, self._capture = self._capture, None
        assert capture is not None
        reached: set[int] = set()
        todo = [capture.tails[self.main]]
        while todo:
            node = todo.pop()
            if node is not None and id(node) not in reached:
                reached.add(id(node))
                todo.extend(node.after)
        loose = [n.what for n in capture.nodes if id(n) not in reached]
        assert not loose, f"captured work was not joined: {loose}"
        return Graph(capture.nodes)

    def replay(self, graph: Graph, seed: int = 0) -> None:
        nodes = _shuffled(graph.nodes, seed) if self.machine.serial else list(graph.nodes)
        key = (self.rank, 0 if self.machine.serial else self.main)
        self.machine.queues.setdefault(key, deque()).append(_Replay(nodes))


def _shuffled(nodes: list[Operation], seed: int) -> list[Operation]:
    """Some topological order."""
    order, left, done, result = random.Random(seed), list(nodes), set(), []
    while left:
        node = order.choice([n for n in left if all(id(d) in done for d in n.after)])
        left.remove(node)
        done.add(id(node))
        result.append(node)
    return result


class SimulatedAdder:
    """Does what `FusedAdd` does, on simulated streams. `driver` is set on a subclass per rank."""

    driver: SimulatedDriver

    def __init__(self, rank: int, size: int, programs: int) -> None:
        self.rank, self.size = rank, size

    def __call__(
        self,
        into: torch.Tensor,
        start: int,
        own: int,
        received: int,
        stride: int,
        count: int,
        wire: torch.dtype,
        divisor: int,
        accumulate: bool,
        stream: int,
    ) -> None:
        target = _at(into.data_ptr() + start * into.element_size(), count, into.dtype)  # keeps nothing, as the kernel
        sources = [
            own if r == self.rank else received + (r - (r > self.rank)) * stride * wire.itemsize
            for r in range(self.size)
        ]

        def add() -> None:
            total = _at(sources[0], count, wire).to(torch.float32, copy=True)
            for source in sources[1:]:
                total += _at(source, count, wire)
            total /= divisor
            if accumulate:
                total += target
            target.copy_(total)

        self.driver.queue(Operation("add", add), stream)


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    block = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(block, dtype=dtype)

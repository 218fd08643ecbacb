"""Gathers, leases, reductions and an allocator that hands memory out anew at once, on simulated streams in any order.

`test_copy_engine_protocol.py` has the transport alone, with fresh memory for everything. Here memory is what it is on a
GPU: a buffer or a gradient that is let go belongs to somebody else in the order of the stream that let it go. What
still reads or writes it, and is not ordered before, is seen as a wrong number.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp.config import GTPConfig
from gtp.runtime import copy_engine, copy_plans
from gtp.runtime.buffers import Buffer, BufferPool
from gtp.runtime.pools import Pools
from gtp.runtime.reduction import Reducer
from gtp.runtime.residency import Gatherer
from gtp.runtime.schedule import Phase, Schedule
from tests.runtime.simulated_streams import Deadlock, Graph, Machine, SimulatedDriver
from tests.runtime.test_copy_engine_protocol import Rank, expected_full, expected_sum, make_ranks

Frozen = Collection[tuple[int, int]]
"""Group and member of weights that do not want a gradient."""


class _Stream:
    """As much of a CUDA stream as a pool asks for."""

    def __init__(self, driver: SimulatedDriver, raw: int) -> None:
        self._driver = driver
        self.raw = raw

    def wait_stream(self, other: _Stream) -> None:
        event = _Event(self._driver)
        event.record(other)
        event.wait(self)


class _Event:
    """As much of a CUDA event as a pool and a transport ask for."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver
        self.cuda_event = driver.new_event()

    def record(self, stream: _Stream) -> None:
        self._driver.record(self.cuda_event, stream.raw)

    def wait(self, stream: _Stream) -> None:
        self._driver.wait_event(stream.raw, self.cuda_event)


class _Allocator:
    """Memory that is given out anew as soon as its tensor is gone, on the stream that it was made on, as torch does."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver
        self._free: dict[tuple[int, int], list[Any]] = {}  # by stream and size
        self._all: list[Any] = []

    def __call__(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        free = self._free.setdefault((self._driver.current_stream(), nbytes), [])
        if free:
            block = free.pop()
        else:
            block = (ctypes.c_char * nbytes)()
            self._all.append(block)  # what is queued may look at it until the end
        memory = torch.frombuffer(block, dtype=dtype)
        weakref.finalize(memory, free.append, block)
        return memory


class _Pool(BufferPool):
    """A pool on simulated streams."""

    def __init__(self, driver: SimulatedDriver, allocate: Callable[[int], torch.Tensor], limit: int) -> None:
        self._driver = driver
        self._streams: dict[int, _Stream] = {}
        super().__init__(allocate, limit=limit, on_cuda=True)

    def _current_stream(self) -> Any:
        raw = self._driver.current_stream()
        if raw != self._raw_stream:
            self._several_streams = self._raw_stream != -1
            self._raw_stream = raw
        return self._streams.setdefault(raw, _Stream(self._driver, raw))

    def _record(self, buffer: Buffer, stream: Any) -> None:
        event: Any = self._spare_events.pop() if self._spare_events else _Event(self._driver)
        event.record(stream)
        buffer.events.append(event)


class _Owner:
    """The parameter of one shard."""

    def __init__(self, shape: Sequence[int], trainer: _Trainer, *, frozen: bool) -> None:
        self._shape = tuple(shape)
        self._trainer = trainer
        self._frozen = frozen
        self.grad: torch.Tensor | None = None

    def wants_gradient(self) -> bool:
        return not self._frozen

    def new_gradient(self) -> torch.Tensor:
        memory = self._trainer.allocate(4 * self._shape[0] * self._shape[1], torch.float32)
        return memory.resize_(self._shape)  # the same object, with whose end the memory is free

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        return (self.new_gradient(), False) if self.grad is None else (self.grad, True)

    def gradient_delivered(self, target: torch.Tensor) -> None:
        self.grad = target


class _Trainer:
    """What the runtime does, for one rank."""

    def __init__(self, me: Rank, over: Sequence[Sequence[int]], config: GTPConfig, limit: int, frozen: Frozen) -> None:
        self.me = me
        self.driver = me.driver
        self.over = [ranks for ranks in over if me.rank in ranks]
        self.limit = limit
        self.second = me.driver.new_stream()
        self.allocate = _Allocator(me.driver)
        self.owners: dict[tuple[int, int], _Owner] = {}
        for group in me.groups:
            for position, member in enumerate(group.members):
                owner = _Owner(member.shard.shape, self, frozen=(group.index, position) in frozen)
                self.owners[group.index, position] = owner
                member.owner = lambda owner=owner: owner
        sizes = [group.gathered_nbytes for group in me.groups]
        assert config.prefetch_bytes is not None
        schedule = Schedule(sizes, prefetch_bytes=config.prefetch_bytes, keep_bytes=config.keep_bytes)
        self.eager = self.pools()
        self.gatherer = Gatherer(me.groups, schedule, self.eager.gathers, me.transport)
        self.reducer = Reducer(me.groups, self.eager.wgrads, me.transport, config, window_bytes=max(sizes))
        self.graphs: list[Pools] = []  # memory of graphs, as long as they may be replayed
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what it should be

    def pools(self) -> Pools:
        return Pools(*[_Pool(self.driver, self.allocate, self.limit) for _ in range(2)])

    def look(self, tensor: torch.Tensor, wanted: torch.Tensor) -> None:
        """A GEMM of the current stream reads it. By address, since a kernel keeps nothing alive."""
        seen = torch.empty(tensor.shape)
        self.seen.append((seen, wanted))
        source, target, half = tensor.data_ptr(), seen.data_ptr(), seen.nbytes // 8 * 4
        for start, count in ((0, half), (half, seen.nbytes - half)):
            self.driver.compute(lambda s=source + start, t=target + start, n=count: ctypes.memmove(t, s, n), "GEMM")

    def use(self, index: int, phase: Phase, time: int, *, inside: bool = True) -> None:
        group = self.me.groups[index]
        for position, full in enumerate(self.gatherer.consume(group, phase, inside=inside)):
            self.look(full, expected_full(group, position, self.over[index], time))

    def use_on_second_stream(self, index: int, phase: Phase, time: int) -> None:
        first = self.driver.main
        self.follow(self.second, first)
        self.driver.main = self.second
        self.use(index, phase, time)
        self.driver.main = first

    def follow(self, stream: int, other: int) -> None:
        event = self.driver.new_event()
        self.driver.record(event, other)
        self.driver.wait_event(stream, event)

    def wgrads(self, index: int, value: int) -> None:
        group = self.me.groups[index]
        buffers = [self.reducer.grad_buffer(group, position) for position in range(len(group.members))]
        fresh = self.me.wgrads(group, value)  # in memory of its own, which stays
        for buffer, wgrad in zip(buffers, fresh, strict=True):
            target, count = buffer.data_ptr(), wgrad.nbytes
            self.driver.compute(lambda t=target, w=wgrad, n=count: ctypes.memmove(t, w.data_ptr(), n), "wgrad")
        self.reducer.finalize(group, buffers)

    def activation(self, value: int, nbytes: int) -> Callable[[], None]:
        """Something of the model's own, in memory of the same allocator. Returns what looks at it again."""
        memory, filled = self.fill(value, nbytes)
        return lambda: self.look(memory, filled)

    def fill(self, value: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that the current stream writes, and what it writes."""
        memory = self.allocate(nbytes, torch.float32)
        filled = torch.full(memory.shape, float(value))
        target = memory.data_ptr()
        self.driver.compute(lambda: ctypes.memmove(target, filled.data_ptr(), filled.nbytes), "activation")
        return memory, filled

    def deliver(self, order: Sequence[int], value: int) -> None:
        self.reducer.end_backward()
        for (index, member), owner in self.owners.items():
            if owner.grad is not None:
                once = expected_sum(self.me.groups[index], member, self.over[index], value, self.me.rank)
                self.look(owner.grad, order.count(index) * once)
                owner.grad = None

    def step(self, order: Sequence[int], second: Collection[int], time: int, between: Callable[[], object]) -> None:
        """
        Args:
            order: Of the groups in forward.
            second: Places in forward and backward that are on the second stream, which joins at the end.
            time: When it runs, or runs last.
            between: Called once, inside the line.
        """
        self.gatherer.open_line()
        whole = [*[(i, Phase.FORWARD) for i in order], *[(i, Phase.BACKWARD) for i in reversed(order)]]
        activations = []
        for place, (index, phase) in enumerate(whole):
            if phase is Phase.BACKWARD:
                self.wgrads(index, time)
            activations.append(self.activation(place, 512 << place % 2))  # as a gradient, or as a weight
            (self.use_on_second_stream if place in second else self.use)(index, phase, time)
            if place == 1:
                between()
        if any(place in second for place in range(len(whole))):
            self.follow(self.driver.main, self.second)
        self.deliver(order, time)
        for look in activations:
            look()
        self.gatherer.close_line()
        self.me.write_shards(1.0)

    def capture(self, captured: Callable[[], object]) -> Graph:
        """As `GTPRuntime` does: memory of its own, which no eager code gets."""
        eager, self.allocate = self.allocate, _Allocator(self.driver)
        self.driver.begin_capture()
        pools = self.pools()
        self.reducer.switch(pools.wgrads, ends=False)
        self.gatherer.switch(pools.gathers, self.driver.capture())
        captured()
        graph = self.driver.end_capture()
        self.reducer.switch(self.eager.wgrads, ends=True)
        self.gatherer.switch(self.eager.gathers, 0)
        pools.gathers.end()
        self.allocate = eager
        self.graphs.append(pools)
        return graph

    def layer(self, index: int, time: int) -> None:
        """A layer alone: forward and backward outside of every line."""
        self.use(index, Phase.FORWARD, time, inside=False)
        self.wgrads(index, time)
        self.deliver([index], time)
        self.use(index, Phase.BACKWARD, time, inside=False)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the program that every rank runs: eager, or a graph that is replayed so often."""

    order: list[int]
    second: frozenset[int]
    replays: int  # 0: eager
    layer: bool  # whether the graph of a layer is replayed inside (of an eager step)


def train(trainer: _Trainer, steps: Sequence[Step], seed: int) -> None:
    ends = list(accumulate(max(step.replays, 1) for step in steps))
    around = [end - 1 for end, step in zip(ends, steps, strict=True) if step.layer and not step.replays]
    layer = trainer.capture(lambda: trainer.layer(0, around[-1])) if around else None
    for step, end in zip(steps, ends, strict=True):
        last = end - 1  # the time of this step, or of the last replay
        if step.replays:
            graph = trainer.capture(lambda: trainer.step(step.order, step.second, last, lambda: None))  # noqa: B023
            for replay in range(step.replays):
                trainer.driver.replay(graph, seed + replay)
        else:
            replayed = layer is not None and step.layer
            between = (lambda: trainer.driver.replay(layer, seed)) if replayed else lambda: None
            trainer.step(step.order, step.second, last, between)


_SHAPES = [[(16, 8)], [(16, 8), (8, 8)], [(16, 8)], [(24, 8)]]
_PAGES = [[(16, 64)], [(15, 64), (31, 64)], [(16, 64)], [(24, 8)]]  # of 4096 bytes, nearly, and not at all
_OVER = {2: [(0, 1)] * 4, 4: [(0, 1, 2, 3)] * 4}
_steps = st.builds(
    Step,
    order=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    second=st.frozensets(st.integers(0, 11), max_size=3),
    replays=st.sampled_from([0, 0, 1, 2]),
    layer=st.booleans(),
)


def run(
    machine: Machine,
    steps: Sequence[Step],
    config: GTPConfig,
    limit: int,
    frozen: Frozen,
    seed: int,
    shapes: Sequence[Sequence[tuple[int, int]]] = _SHAPES,
) -> None:
    """Trains on all ranks, and looks at all that any of them has read."""
    trainers = _trainers(machine, config, limit, frozen, shapes)
    for trainer in trainers:
        train(trainer, steps, seed)
    machine.run(seed)
    _check(trainers)


def _trainers(
    machine: Machine,
    config: GTPConfig,
    limit: int,
    frozen: Frozen,
    shapes: Sequence[Sequence[tuple[int, int]]] = _SHAPES,
) -> list[_Trainer]:
    over = _OVER[machine.ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine, "MAILBOX_BYTES", 4096)
        patch.setattr(copy_plans, "SPLIT_BYTES", 0)
        return [_Trainer(me, over, config, limit, frozen) for me in make_ranks(machine, over, shapes)]


def _check(trainers: Sequence[_Trainer]) -> None:
    for trainer in trainers:
        for seen, wanted in trainer.seen:
            assert torch.equal(seen, wanted)


@pytest.mark.parametrize("ranks, serial", [(2, False), (2, True), (4, False)])
@given(
    seed=st.integers(0, 2**31),
    steps=st.lists(_steps, min_size=3, max_size=4),
    window=st.sampled_from([0, 512, 2048]),
    kept=st.sampled_from([0, 2048]),
    limit=st.sampled_from([0, 2048, 1 << 30]),
    frozen=st.sets(st.sampled_from([(1, 0), (1, 1)])),
)
@settings(max_examples=12)
def test_memory_is_reused_after_everybody_has_read_it(
    ranks: int, serial: bool, seed: int, steps: list[Step], window: int, kept: int, limit: int, frozen: Frozen
) -> None:
    config = GTPConfig(prefetch_bytes=window, keep_bytes=kept, grad_reduce="sum")
    run(Machine(ranks, serial=serial), steps, config, limit, frozen, seed)


@pytest.mark.parametrize("ranks, serial", [(2, False), (2, True), (4, False)])
@given(
    seed=st.integers(0, 2**31),
    steps=st.lists(_steps, min_size=3, max_size=4),
    window=st.sampled_from([0, 8192, 32768]),
    kept=st.sampled_from([0, 16384]),
    limit=st.sampled_from([0, 1 << 30]),
)
@settings(max_examples=8)
def test_own_shards_in_place_are_what_a_copy_of_them_would_be(
    ranks: int, serial: bool, seed: int, steps: list[Step], window: int, kept: int, limit: int
) -> None:
    """An optimizer writes into what GEMMs read: before the first read of the next step, after the last of this one."""
    machine = Machine(ranks, serial=serial)
    config = GTPConfig(prefetch_bytes=window, keep_bytes=kept, grad_reduce="sum")
    run(machine, steps, config, limit, [], seed, _PAGES)


def test_graphs_captured_one_after_the_other_share_what_is_mapped() -> None:
    """A graph that was captured anew every few steps would hold more and more otherwise."""
    machine = Machine(2)
    trainers = _trainers(machine, GTPConfig(prefetch_bytes=16384, grad_reduce="sum"), 1 << 30, [], _PAGES)
    held: list[int] = []
    for trainer in trainers:
        for time in range(5):
            graph = trainer.capture(lambda: trainer.step([0, 1, 2, 3], [], time, lambda: None))  # noqa: B023
            trainer.driver.replay(graph, time)
            held.append(trainer.me.transport.mapped_bytes)
    machine.run(0)
    _check(trainers)
    assert held == [held[0]] * 10
    assert held[0] > 0


def test_a_graph_of_two_streams_reuses_what_is_mapped_after_both() -> None:
    """Also where a pool may keep nothing: memory of one stream is not handed to another that does not wait for it."""
    for limit in (0, 1 << 30):
        for seed in range(2):
            machine = Machine(2)
            trainers = _trainers(machine, GTPConfig(prefetch_bytes=0, grad_reduce="sum"), limit, [], _PAGES)
            for trainer in trainers:
                train(trainer, [Step([2, 1, 0, 1], frozenset([5]), 1, layer=False)], seed)
            machine.run(seed, starved=[trainer.second for trainer in trainers])
            _check(trainers)


@pytest.mark.parametrize("replays", [0, 2], ids=["eager", "graphs"])
@pytest.mark.parametrize("limit", [0, 2048, 1 << 30])
def test_memory_that_two_streams_read_is_reused_after_both(replays: int, limit: int) -> None:
    """A pool that may keep nothing gives memory back to the allocator, which gives it to others on its own stream."""
    order = [0, 0, 2, 1, 2, 3, 0]
    steps = [
        Step(order, frozenset(second), replays, layer=False)
        for second in ([0, 2, 4], [2, 3, 9], [0, 2, 3, 4, 5, 7, 8, 11, 12], [1, 2, 10])
    ]
    for window, kept in ((0, 0), (1024, 0), (2048, 2048)):
        config = GTPConfig(prefetch_bytes=window, keep_bytes=kept, grad_reduce="sum")
        for seed in range(4):
            run(Machine(2), steps, config, limit, [], seed)


def _delete(trainer: _Trainer, order: Sequence[int], time: int, raised: bool) -> None:
    """The model goes after a forward that raised, or a backward that did; its memory is others' then."""
    trainer.gatherer.open_line()
    for index in order if raised else order[:2]:
        trainer.use(index, Phase.FORWARD, time)
    for index in reversed(order[1:] if raised else []):
        trainer.wgrads(index, time)
    trainer.me.transport.shutdown()
    del trainer.gatherer, trainer.reducer, trainer.eager
    for owner in trainer.owners.values():
        owner.grad = None
    trainer.seen += [trainer.fill(i, size) for i in range(9) for size in (1024, 512, 1536, 768, 256)]


@pytest.mark.parametrize("raised", [False, True], ids=["forward raised", "backward raised"])
def test_a_model_that_goes_in_mid_line_leaves_nothing_in_flight(raised: bool) -> None:
    """Copies ahead of their use, and additions, would write into what got the memory next."""
    order, config = [0, 1, 2, 3], GTPConfig(prefetch_bytes=2048, grad_reduce="sum")
    for late in ("copies", "additions"):
        machine = Machine(2)
        trainers = _trainers(machine, config, 1 << 30, [])
        for trainer in trainers:
            for time in range(2):
                trainer.step(order, [], time, lambda: None)
            _delete(trainer, order, 2, raised)
        transports = [trainer.me.transport for trainer in trainers]
        copying = {stream for t in transports for stream in (*t._pulls, t._local)}
        adding = {stream for t in transports for stream in t._mail.all_streams}
        machine.run(0, starved=copying if late == "copies" else adding)
        _check(trainers)


class _LostRank:
    """As much of a watchdog as the end of a model asks for."""

    failed = True

    def stop(self) -> None:
        pass


def test_a_model_that_goes_because_a_rank_was_lost_holds_nobody_up() -> None:
    """The lost rank never begins its forward, and what is queued after the model has gone runs all the same."""
    machine = Machine(2)
    trainer, lost = _trainers(machine, GTPConfig(prefetch_bytes=2048, grad_reduce="sum"), 1 << 30, [])
    trainer.gatherer.open_line()
    trainer.me.transport._watchdog = _LostRank()  # type: ignore[assignment]
    trainer.me.transport.shutdown()
    memory, filled = trainer.fill(3, 512)
    with pytest.raises(Deadlock):  # copies wait for ever
        machine.run(0)
    assert torch.equal(memory, filled)
    assert lost.seen == []

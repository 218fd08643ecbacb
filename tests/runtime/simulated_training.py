"""What a runtime does for one rank, on simulated streams, with an allocator that hands memory out anew at once."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gtp.config import GTPConfig
from gtp.runtime.buffers import Buffer, BufferPool
from gtp.runtime.pools import Pools
from gtp.runtime.reduction import Reducer
from gtp.runtime.reduction_order import ReductionOrder
from gtp.runtime.residency import Gatherer
from gtp.runtime.schedule import Phase, Schedule
from tests.runtime.simulated_streams import Graph, SimulatedDriver
from tests.runtime.test_copy_engine_protocol import Rank, expected_full, expected_sum

Frozen = Collection[tuple[int, int]]
"""Group and member of weights that do not want a gradient."""


class Stream:
    """As much of a CUDA stream as a pool asks for."""

    def __init__(self, driver: SimulatedDriver, raw: int) -> None:
        self._driver = driver
        self.raw = raw

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._driver)
        event.record(other)
        event.wait(self)


class Event:
    """As much of a CUDA event as a pool and a transport ask for."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver
        self.cuda_event = driver.new_event()

    def record(self, stream: Stream) -> None:
        self._driver.record(self.cuda_event, stream.raw)

    def wait(self, stream: Stream) -> None:
        self._driver.wait_event(stream.raw, self.cuda_event)


class Allocator:
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


class Pool(BufferPool):
    """A pool on simulated streams."""

    def __init__(self, driver: SimulatedDriver, allocate: Callable[[int], torch.Tensor], limit: int) -> None:
        self._driver = driver
        self._streams: dict[int, Stream] = {}
        super().__init__(allocate, limit=limit, on_cuda=True)

    def _current_stream(self) -> Any:
        raw = self._driver.current_stream()
        if raw != self._raw_stream:
            self._several_streams = self._raw_stream != -1
            self._raw_stream = raw
        return self._streams.setdefault(raw, Stream(self._driver, raw))

    def _record(self, buffer: Buffer, stream: Any) -> None:
        event: Any = self._spare_events.pop() if self._spare_events else Event(self._driver)
        event.record(stream)
        buffer.events.append(event)


class Owner:
    """The parameter of one shard."""

    def __init__(self, shape: Sequence[int], trainer: Trainer, *, frozen: bool) -> None:
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


class Trainer:
    """What the runtime does, for one rank."""

    def __init__(self, me: Rank, over: Sequence[Sequence[int]], config: GTPConfig, limit: int, frozen: Frozen) -> None:
        self.me = me
        self.driver = me.driver
        self.over = [ranks for ranks in over if me.rank in ranks]
        self.limit = limit
        self.second = me.driver.new_stream()
        self.allocate = Allocator(me.driver)
        self.owners: dict[tuple[int, int], Owner] = {}
        for group in me.groups:
            for position, member in enumerate(group.members):
                owner = Owner(member.shard.shape, self, frozen=(group.index, position) in frozen)
                self.owners[group.index, position] = owner
                member.owner = lambda owner=owner: owner
        sizes = [group.gathered_nbytes for group in me.groups]
        assert config.prefetch_bytes is not None
        schedule = Schedule(sizes, prefetch_bytes=config.prefetch_bytes, keep_bytes=config.keep_bytes)
        self.eager = self.pools()
        self.gatherer = Gatherer(me.groups, schedule, self.eager.gathers, me.transport)
        self.reducer = Reducer(
            me.groups, self.eager.wgrads, me.transport, config, window_bytes=max(sizes), order=ReductionOrder()
        )
        self.graphs: list[Pools] = []  # memory of graphs, as long as they may be replayed
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what it should be

    def pools(self) -> Pools:
        return Pools(*[Pool(self.driver, self.allocate, self.limit) for _ in range(2)])

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
            self.copy(buffer, wgrad)
        self.reducer.finalize(group, buffers)

    def copy(self, buffer: torch.Tensor, wgrad: torch.Tensor) -> None:
        """A GEMM of the current stream writes a wgrad. By address, since a kernel keeps nothing alive."""
        target, count = buffer.data_ptr(), wgrad.nbytes
        self.driver.compute(lambda: ctypes.memmove(target, wgrad.data_ptr(), count), "wgrad")

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
        eager, self.allocate = self.allocate, Allocator(self.driver)
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

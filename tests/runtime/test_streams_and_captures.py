"""What crosses a boundary: a copy used on two streams, a line that meets a CUDA graph capture, the end of a runtime."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.errors import GTPStateError
from gtp.runtime import runtime as runtime_module
from gtp.runtime.buffers import Buffer, BufferPool
from gtp.runtime.group import Member, WeightGroup
from gtp.runtime.process_group import ProcessGroupTransport
from gtp.runtime.residency import Gatherer
from gtp.runtime.schedule import Phase, Schedule
from gtp.testing.null_transport import NullTransport
from tests.runtime.simulated_streams import Machine
from tests.runtime.test_copy_engine_protocol import expected_full, make_ranks
from tests.weights.side_by_side import SideBySide, inputs, settled, square


class _Stream:
    """As much of a CUDA stream as a pool asks for."""

    def __init__(self) -> None:
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


class _Pool(BufferPool):
    """A pool whose current stream is set by hand, and which notes where ends of leases are recorded."""

    current: Any

    def __init__(self) -> None:
        self.current = _Stream()
        self.recorded: list[Any] = []
        super().__init__(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), limit=1 << 20, on_cuda=True)

    def _current_stream(self) -> Any:
        return self.current

    def _record(self, buffer: Buffer, stream: Any) -> None:
        self.recorded.append(stream)


def test_a_copy_used_on_two_streams_is_waited_for_and_ended_on_both() -> None:
    pool = _Pool()
    first, second = pool.current, _Stream()
    for _ in range(2):  # the buffer's second life knows nothing of the first
        pool.current = first
        buffer = pool.lease(256)
        pool.recorded.clear()
        second.waited_for.clear()
        (view,) = buffer.views(0, [(4,)], torch.float32)
        handed = []
        for stream in (first, second, first, second):
            pool.current = stream
            handed.append(view.detach())
            pool.hand_out(buffer, handed[-1])
        pool.let_go(buffer)
        assert pool.recorded == []
        handed.clear()
        assert pool.recorded == [first, second]
        assert second.waited_for == [first]  # it was the first that waited for the gather
        assert first.waited_for == []


def test_a_wgrad_ends_on_the_current_stream() -> None:
    pool = _Pool()
    buffer = pool.lease(256)
    pool.recorded.clear()
    pool.current = _Stream()
    pool.let_go(buffer)
    assert pool.recorded == [pool.current]


def test_a_wgrad_that_somebody_still_looks_at_ends_on_the_stream_where_it_was_let_go() -> None:
    """Found at rest on another stream, it is not taken for one that was used there."""
    pool = _Pool()
    first = pool.current
    buffer = pool.lease(256)
    (view,) = buffer.views(0, [(4,)], torch.float32)
    seen = view[:2]
    pool.let_go(buffer)
    pool.recorded.clear()
    pool.current = _Stream()
    del seen
    assert pool.lease(256) is buffer
    assert pool.recorded == [first]


class _FakeCuda:
    """Two streams, and a note of who waited for whose event. Stands in for torch's own in `monkeypatch`'s time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 1
        self.log: list[str] = []
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "Event", lambda: _FakeEvent(self.log))


class _FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self, stream: int) -> None:
        self._of = stream

    def wait(self, stream: int) -> None:
        self._log.append(f"{stream} waits for {self._of}")


class _Logging(NullTransport):
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def start_gather(self, *_: Any) -> Any:
        self._log.append("gather")


@pytest.mark.parametrize("readers, waits", [([1], []), ([2], ["1 waits for 2"])])
def test_in_a_capture_a_gather_comes_after_readers_on_other_streams(
    monkeypatch: pytest.MonkeyPatch, readers: list[int], waits: list[str]
) -> None:
    """Transports fork from the current stream there. Where it was the reader, nothing is waited for twice."""
    cuda = _FakeCuda(monkeypatch)
    shard = torch.ones(2, 4)
    member = Member("w", 4, 2, (4,), shard, shard, lambda: None)
    group = WeightGroup(0, "w", [member], None, 0, 2, None, torch.float32)  # type: ignore[arg-type]  # no ranks needed
    schedule = Schedule([64], prefetch_bytes=0, keep_bytes=0)
    pool = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), limit=1 << 20, on_cuda=True)
    gatherer = Gatherer([group], schedule, pool, _Logging(cuda.log))
    gatherer.switch(pool, capture=7)
    for reader in readers:
        cuda.current = reader
        (full,) = gatherer.consume(group, Phase.FORWARD, inside=False)
        assert full.shape == (4, 4)
        del full
    cuda.current = 1
    cuda.log.clear()
    gatherer.consume(group, Phase.FORWARD, inside=False)
    assert pool.reserved_bytes == 256  # the same buffer
    assert cuda.log == [*waits, "gather"]


def _capture_while_a_forward_waits() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    runtime = gtp.shard_model(model, dist.group.WORLD)
    x = torch.ones(2, 4)
    runtime._on_cuda = True
    real, closes = runtime_module.current_capture, [0]
    close = runtime.transport.close

    def counting() -> None:
        closes[0] += 1
        close()

    runtime.transport.close = counting  # type: ignore[method-assign]
    try:
        loss = model(x).sum()
        runtime_module.current_capture = lambda device: 7
        for use in (model, model[1]):  # a whole step, and a layer: again, since nothing has changed
            for _ in range(2):
                with pytest.raises(GTPStateError, match=r"waits for its backward.*runtime\.release"):
                    use(x)
        assert closes == [0]
        runtime_module.current_capture = real
        loss.backward()
        assert closes == [1]
        wanted = model[0].weight.grad.clone()
        model(x)
        runtime.release()
        assert closes == [2]
        model.zero_grad()
        runtime_module.current_capture = lambda device: 7
        model(x).sum().backward()
        assert torch.equal(model[0].weight.grad.shard, wanted.shard)
    finally:
        runtime_module.current_capture = real


def test_a_capture_is_refused_while_a_forward_waits_for_its_backward(ranks: Any) -> None:
    """The line's signals would be closed inside the graph. After the backward, or release(), it is welcome."""
    ranks(2).run(_capture_while_a_forward_waits)


def _capture_while_gradients_are_held() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    runtime = gtp.shard_model(model, dist.group.WORLD)
    x = torch.ones(2, 4)
    with runtime.no_sync():
        model(x).sum().backward()
    runtime._on_cuda = True
    real = runtime_module.current_capture
    try:
        runtime_module.current_capture = lambda device: 7
        for _ in range(2):
            with pytest.raises(GTPStateError, match="no_sync"):
                model(x)
    finally:
        runtime_module.current_capture = real
    model(x).sum().backward()
    assert torch.equal(model[0].weight.grad.shard, torch.full((2, 4), 4.0))


def test_a_refused_capture_changes_nothing(ranks: Any) -> None:
    """It is refused each time it is tried, and eager code goes on where it was."""
    ranks(2).run(_capture_while_gradients_are_held)


def _backward_raises_in_a_capture(release: bool) -> None:
    twins = SideBySide(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    runtime, every = twins.runtime, inputs(1, 3, 4)
    twins.step(inputs(0, 3, 4))
    eager = runtime._pools
    runtime._on_cuda = True
    real = runtime_module.current_capture

    def fail(grad: torch.Tensor) -> None:
        raise MemoryError("simulated")

    handle = twins.sharded[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    try:
        runtime_module.current_capture = lambda device: 7
        with pytest.raises(MemoryError, match="simulated"):
            square(twins.sharded, every[twins.rank]).backward()
        captured, abandoned = runtime._pools, list(runtime._reducer._in_flight)
        assert captured is not eager
        assert len(abandoned) > 0
    finally:
        runtime_module.current_capture = real
    handle.remove()
    # in a graph that was thrown away there is nobody to wait for
    finish, finished = runtime.transport.finish_reduce, []
    runtime.transport.finish_reduce = lambda ticket: (finished.append(ticket), finish(ticket))[1]
    twins.sharded.zero_grad()
    if release:
        runtime.release()
    for step in range(2, 4):
        twins.step(inputs(step, 3, 4))
    assert not {id(flight.ticket) for flight in abandoned} & {id(ticket) for ticket in finished}
    assert runtime._pools is eager
    assert settled(lambda: captured.wgrads.trim() or captured.wgrads.leased_bytes, lambda leased: leased == 0) == 0


@pytest.mark.parametrize("release", [False, True])
def test_after_a_backward_that_raised_in_a_capture_eager_steps_are_right(ranks: Any, release: bool) -> None:  # C48
    """Each use was refused because gradients were on their way, and release() waited for events of the graph."""
    ranks(2).run(_backward_raises_in_a_capture, release)


def test_a_capture_given_up_inside_a_line_leaves_no_signal_behind() -> None:
    """An exception in one rank's captured forward: the next eager line, on all ranks, is an ordinary one."""
    machine = Machine(2)
    ranks = make_ranks(machine, [(0, 1)], [[(3, 4)]])
    for me in ranks:
        me.driver.begin_capture()
        me.transport.open(me.groups)
        me.use(*me.gather(me.groups[0]))
        if me.rank == 0:
            me.driver._capture = None  # the graph is thrown away
        me.transport.close()
        if me.rank == 1:
            me.driver.end_capture()  # a whole step, which rank 0 did not get to
        me.seen.clear()
        me.transport.open(me.groups)
        me.use(*me.gather(me.groups[0]))
        me.transport.close()
    machine.run(0)
    for me in ranks:
        assert torch.equal(me.seen[0][0], expected_full(me.groups[0], 0, (0, 1), 0))


def test_an_eager_line_cannot_end_inside_a_capture() -> None:
    (me,) = make_ranks(Machine(1), [(0,)], [[(3, 4)]])
    me.transport.open(me.groups)
    me.driver.begin_capture()
    with pytest.raises(GTPStateError, match="release"):
        me.transport.close()


class _Counting(NullTransport):
    def __init__(self, shutdowns: list[str]) -> None:
        self._shutdowns = shutdowns

    def shutdown(self) -> None:
        self._shutdowns.append("down")


def _deleted() -> None:
    for debug in (False, True):
        shutdowns: list[str] = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        config = gtp.GTPConfig(debug=debug)
        runtime = gtp.shard_model(model, dist.group.WORLD, transport=_Counting(shutdowns), config=config)
        gone = weakref.ref(runtime)
        model(torch.ones(2, 4)).sum().backward()
        del runtime
        assert shutdowns == []
        del model
        assert gone() is None
        assert shutdowns == ["down"]


def test_the_transport_is_shut_down_with_the_model(ranks: Any) -> None:
    """Without help of the garbage collector: whatever threads it has are gone when the memory is."""
    ranks(2).run(_deleted)


@pytest.mark.parametrize("capturing", [False, True])
def test_collectives_of_a_model_that_goes_end_before_what_comes_next(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """Their memory is the allocator's after that. Another model's capture could not wait for what is outside of it."""
    current = _Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    transport: Any = ProcessGroupTransport(torch.device("cpu"))
    transport.shutdown()
    assert current.waited_for == []  # on the CPU works hold their tensors
    transport._gathers, transport._reductions = _Stream(), _Stream()
    transport.shutdown()
    assert current.waited_for == ([] if capturing else [transport._gathers, transport._reductions])

"""The copy engine on real streams. One GPU is enough: two ranks share it, over gloo. With two, each has its own.

`test_copy_engine_protocol.py` searches the orders of events without a GPU. Here it is shown that the driver does what
the simulation assumes: stream waits and writes between processes, copies from mapped memory, capture and replay, the
addition kernel. Delays (`torch.cuda._sleep` on one rank's stream) open the races. The whole runtime on top of
it trains in `test_copy_engine_training.py`.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, PeerError
from gtp.ops.peer import why_not
from gtp.runtime import copy_engine
from gtp.runtime.buffers import Buffer
from gtp.runtime.copy_engine import CopyEngineTransport
from gtp.runtime.group import Member, WeightGroup
from gtp.testing.ranks import RankPool, RankPools, rank, world_size

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# Rows and columns of a shard. The third is of whole pages of a GPU, the fourth group's are nearly.
SHAPES = [[(512, 1024)], [(3, 7), (300, 257), (1, 1)], [(2048, 1024)], [(1000, 1024), (1500, 2048)], [(64, 64)] * 8]
SLEEP = 400_000  # cycles: a fifth of a millisecond or so


def device_of_rank() -> torch.device:
    device = torch.device("cuda", rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make_groups(dtype: torch.dtype, device: torch.device, shapes: list[list[tuple[int, int]]]) -> list[WeightGroup]:
    groups = []
    for index, members in enumerate(shapes):
        made = [
            Member(f"w{index}.{i}", rows * world_size(), rows, (columns,), shard, shard, lambda: None)
            for i, (rows, columns) in enumerate(members)
            for shard in [torch.full((rows, columns), float(4 * index + rank()), dtype=dtype, device=device)]
        ]
        group = dist.group.WORLD
        groups.append(WeightGroup(index, f"w{index}", made, group, rank(), world_size(), None, dtype))
    return groups


class Line:
    """Drives a transport as the runtime does, checks everything on the device, and sleeps where it is told to.

    Shards count steps up; wgrads are small integers. So all sums are exact in every dtype.
    """

    def __init__(self, transport: CopyEngineTransport, groups: list[WeightGroup], device: torch.device) -> None:
        self.transport, self.groups, self.device = transport, groups, device
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.step_on_device = torch.zeros((), device=device)
        self.buffers: list[Buffer] = []
        self.outs = {g.index: self._outs(g) for g in groups}
        self.wgrads = {index: [torch.empty_like(o) for o in outs] for index, outs in self.outs.items()}
        self.into = {g.index: [torch.full_like(m.shard, 3.0, dtype=torch.float32) for m in g.members] for g in groups}
        self.free: dict[int, torch.cuda.Event | None] = dict.fromkeys(self.outs)

    def _outs(self, group: WeightGroup) -> list[torch.Tensor]:
        """With this rank's own shards in place, where they are whole pages."""
        shapes = [m.padded_shape(group.size) for m in group.members]
        place = self.transport.place(group)
        if place is None:
            return [torch.empty(shape, dtype=group.compute_dtype, device=self.device) for shape in shapes]
        self.buffers.append(place.new_buffer(None))
        self.buffers[-1].enter(place)
        return self.buffers[-1].views(group.index, shapes, group.compute_dtype)

    def gather(self, group: WeightGroup) -> Any:
        event = self.free[group.index]
        return self.transport.start_gather(group, self.outs[group.index], [] if event is None else [event])

    def use(self, group: WeightGroup, ticket: Any) -> None:
        self.transport.finish_gather(ticket)
        for member, out in zip(group.members, self.outs[group.index], strict=True):
            for peer in range(group.size):
                rows = out[peer * member.shard_rows : (peer + 1) * member.shard_rows]
                self.bad += (rows != self.step_on_device + 4 * group.index + peer).sum()
                if peer != group.rank or self.transport.place(group) is None:  # else it is the shard
                    rows.fill_(-7.0)  # whoever reads this buffer too late sees it
        if not torch.cuda.is_current_stream_capturing():
            self.free[group.index] = torch.cuda.Event()
            self.free[group.index].record()

    def reduce(self, group: WeightGroup) -> Any:
        for i, wgrad in enumerate(self.wgrads[group.index]):
            wgrad.fill_(0.0)
            wgrad += torch.remainder(self.step_on_device, 16) + rank() + i % 3 + 1
        return self.transport.start_reduce(
            group, self.wgrads[group.index], self.into[group.index], [i % 2 == 1 for i in range(len(group.members))], 2
        )

    def reduced(self, group: WeightGroup, ticket: Any) -> None:
        self.transport.finish_reduce(ticket)
        for i, target in enumerate(self.into[group.index]):
            ranks = sum(range(world_size()))
            want = (world_size() * (torch.remainder(self.step_on_device, 16) + i % 3 + 1) + ranks) / 2
            self.bad += (target != want + 3.0 * (i % 2)).sum()
            target.fill_(3.0)
        for wgrad in self.wgrads[group.index]:
            wgrad.fill_(float("nan"))  # whoever reads it now reads it too late

    def step(self, sleep: str | None = None) -> None:
        self._sleep(sleep, "before publication")
        self.transport.open(self.groups)
        order = [*self.groups, *reversed(self.groups)]
        flying, running = [self.gather(order[0])], []
        for position, group in enumerate(order):
            ticket = flying.pop() if flying else self.gather(group)
            if position + 1 < len(order) and order[position + 1] is not group:  # one buffer a group: not twice at once
                flying.append(self.gather(order[position + 1]))
                self._sleep(sleep, "amid gathers")
            self.use(group, ticket)
            if position >= len(self.groups):
                self._sleep(sleep, "before a reduction")
                running.append((group, self.reduce(group)))
                self._sleep(sleep, "amid reductions")
                if len(running) > 2:
                    self.reduced(*running.pop(0))
        for group, ticket in running:
            self.reduced(group, ticket)
        self._sleep(sleep, "before close")
        self.transport.close()
        self._sleep(sleep, "before the optimizer")
        for group in self.groups:
            for member in group.members:
                member.shard += 1
        self.step_on_device += 1

    def _sleep(self, wanted: str | None, here: str) -> None:
        if wanted == here:
            torch.cuda._sleep(SLEEP)


PLACES = (
    "before publication", "amid gathers", "before a reduction", "amid reductions", "before close",
    "before the optimizer",
)  # fmt: skip


def make_line(dtype: torch.dtype, shapes: Any = SHAPES) -> Line:
    device = device_of_rank()
    assert why_not(dist.group.WORLD, device) is None
    transport = CopyEngineTransport(device, peer_timeout=20.0)
    groups = make_groups(dtype, device, shapes)
    transport.prepare(groups)
    return Line(transport, groups, device)


def races(dtype: torch.dtype, steps: int, mailbox_bytes: int) -> int:
    copy_engine.MAILBOX_BYTES = mailbox_bytes  # small: many messages a weight, mailboxes reused at once
    line = make_line(dtype)
    order = random.Random(1)
    for step in range(steps):
        late, place = order.randrange(world_size()), order.choice(PLACES)
        line.step(place if late == rank() else None)
        if step % 16 == 15:
            torch.cuda.synchronize()  # bf16 counts to 256 exactly, and the queue stays short
    torch.cuda.synchronize()
    line.transport.shutdown()
    return int(line.bad)


@pytest.mark.parametrize("mailbox_bytes", [256 << 10, 32 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_hundred_steps_with_one_rank_late_are_exact(pair: RankPool, dtype: torch.dtype, mailbox_bytes: int) -> None:
    assert pair.run(races, dtype, 200, mailbox_bytes, timeout=100) == [0, 0]


def graph_of_a_step() -> dict[str, int]:
    line = make_line(torch.float32)
    for _ in range(2):
        line.step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        line.step()
    order = random.Random(2)
    for _ in range(20):
        if order.randrange(world_size()) == rank():
            torch.cuda._sleep(SLEEP)
        graph.replay()
    steps_after_replays = int(line.step_on_device)
    line.step()  # eager again: signals and mailboxes are where a line leaves them
    graph.replay()
    torch.cuda.synchronize()
    found = {"bad": int(line.bad), "steps": steps_after_replays}
    line.transport.shutdown()
    return found


def test_a_captured_step_replays_exactly_and_mixes_with_eager_steps(pair: RankPool) -> None:
    assert pair.run(graph_of_a_step, timeout=100) == [{"bad": 0, "steps": 22}] * 2


def capture_without_warm_up() -> str:
    line = make_line(torch.float64, [[(16, 16)]])
    message = ""
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):  # the capture breaks with it
        try:
            line.step()
        except GTPStateError as error:
            message = str(error)
    return message


def test_a_capture_without_warm_up_is_refused() -> None:
    pools = RankPools()
    messages = pools(2).run(capture_without_warm_up, timeout=100)
    pools.close()
    for message in messages:
        assert "run one full step" in message


def republished() -> list[float]:
    line = make_line(torch.float32, [[(8, 16)]])
    (member,) = line.groups[0].members
    seen = []
    member.shard = member.send = torch.full((8, 16), 100.0 + rank(), device=line.device)
    for value in (0.0, 1.0):
        member.shard += value
        line.transport.open(line.groups)
        line.transport.finish_gather(line.gather(line.groups[0]))
        seen.append(line.outs[0][0][:, 0].tolist()[::8])
        line.transport.close()
    line.transport.shutdown()
    return seen


def test_a_parameter_that_left_peer_memory_is_published_by_a_copy(pair: RankPool) -> None:
    assert pair.run(republished, timeout=60) == [[[100.0, 101.0], [101.0, 102.0]]] * 2


def summed_flats() -> list[bool]:
    line = make_line(torch.float32, [[(8, 16)]])
    results = []
    for numel in (1, 1000, 3 << 20):  # the last is beyond what the mailboxes take, and goes by a collective
        flat = torch.arange(numel, dtype=torch.float32, device=line.device) + rank()
        ticket = line.transport.start_all_reduce(flat, [dist.group.WORLD])
        line.transport.finish_all_reduce(ticket)
        results.append(torch.equal(flat.cpu(), 2 * torch.arange(numel, dtype=torch.float32) + 1))
    line.transport.shutdown()
    return results


def test_replicated_gradients_are_summed(pair: RankPool) -> None:
    assert pair.run(summed_flats, timeout=60) == [[True] * 3] * 2


def lonely() -> str:
    line = make_line(torch.float32, [[(8, 16)]])
    line.step()
    torch.cuda.synchronize()
    line.transport._watchdog._timeout = 2.0
    if rank() == 1:
        time.sleep(8)  # never comes
        return ""
    begin = time.monotonic()
    line.step()
    torch.cuda.synchronize()  # released by the watchdog
    took = time.monotonic() - begin
    with pytest.raises(PeerError) as caught:
        line.step()
    assert 1.0 < took < 10.0, took
    # What was queued before the error came waits for the lost rank, too, and freeing memory waits for the device.
    driver, domain = line.transport._driver, line.transport._domains[dist.group.WORLD]
    for _ in range(3):
        driver.submit(domain.line(False).await_posts, driver.current_stream())
    begin = time.monotonic()
    line.transport.shutdown()
    text = str(caught.value)
    del line, caught, driver, domain
    gc.collect()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 8.0
    return text


def test_a_rank_that_does_not_come_is_named(pair: RankPool) -> None:
    pools = RankPools()
    message, _ = pools(2).run(lonely, timeout=60)
    pools.close()
    assert "for rank 1 of group" in message
    assert "begin its forward" in message

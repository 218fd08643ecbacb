"""The copy engine on real streams. One GPU is enough: two ranks share it, over gloo. With two, each has its own.

`test_copy_engine_protocol.py` searches the orders of events without a GPU. Here it is shown that the driver does what
the simulation assumes: stream waits and writes between processes, copies from mapped memory, capture and replay, the
addition kernel, and the whole runtime on top. Delays (`torch.cuda._sleep` on one rank's stream) open the races.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.errors import GTPStateError, PeerError
from gtp.ops.peer import why_not
from gtp.runtime import copy_engine
from gtp.runtime.copy_engine import CopyEngineTransport
from gtp.runtime.group import Member, WeightGroup
from gtp.testing.ranks import RankPool, RankPools, rank, world_size
from tests.reference import assert_same_parameters, data_parallel_backward

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SHAPES = [[(512, 1024)], [(3, 7), (300, 257), (1, 1)], [(2048, 1024)], [(64, 64)] * 8]  # rows and columns of a shard
SLEEP = 400_000  # cycles: a fifth of a millisecond or so


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each, or one for both."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    pools = RankPools()
    yield pools(2)
    pools.close()


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
        self.outs = {
            g.index: [torch.empty(m.padded_shape(g.size), dtype=g.compute_dtype, device=device) for m in g.members]
            for g in groups
        }
        self.wgrads = {index: [torch.empty_like(o) for o in outs] for index, outs in self.outs.items()}
        self.into = {g.index: [torch.full_like(m.shard, 3.0, dtype=torch.float32) for m in g.members] for g in groups}
        self.free: dict[int, torch.cuda.Event | None] = dict.fromkeys(self.outs)

    def gather(self, group: WeightGroup) -> Any:
        event = self.free[group.index]
        return self.transport.start_gather(group, self.outs[group.index], [] if event is None else [event])

    def use(self, group: WeightGroup, ticket: Any) -> None:
        self.transport.finish_gather(ticket)
        for member, out in zip(group.members, self.outs[group.index], strict=True):
            for peer in range(group.size):
                rows = out[peer * member.shard_rows : (peer + 1) * member.shard_rows]
                self.bad += (rows != self.step_on_device + 4 * group.index + peer).sum()
            out.fill_(-7.0)  # whoever reads this buffer too late sees it
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
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(pair: RankPool) -> None:
    pools = RankPools()
    message, _ = pools(2).run(lonely, timeout=60)
    pools.close()
    assert "for rank 1 of group" in message
    assert "begin its forward" in message


# -- the whole runtime ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Without an embedding: its backward on CUDA adds in no fixed order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(50, 64, bias=False)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)) for _ in "1234"]
        )
        self.head = nn.Linear(64, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(nn.functional.one_hot(ids, 50).to(self.head.bias.dtype))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten().roll(1))


def batches(step: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 50, (2, 8), generator=generator).to(device) for _ in range(world_size())]


def train_both(keep_bytes: int) -> dict[str, Any]:
    device = device_of_rank()
    torch.manual_seed(0)
    plain, sharded = Model().to(device), Model().to(device)
    sharded.load_state_dict(plain.state_dict())
    config = gtp.GTPConfig(transport="copy_engine", keep_bytes=keep_bytes)
    runtime = gtp.shard_model(sharded, dist.group.WORLD, config=config)
    ours, theirs = torch.optim.AdamW(sharded.parameters(), 1e-2), torch.optim.AdamW(plain.parameters(), 1e-2)
    same_losses = []
    for step in range(6):
        mine = batches(step, device)
        loss = loss_of(sharded, mine[rank()])
        loss.backward()
        wanted = data_parallel_backward(plain, mine, loss_of)
        # Before the first update all weights are equal, and so is the forward, bit for bit. cuBLAS may take other
        # kernels for the wgrads (theirs are transposed), which round otherwise, and AdamW scales that up to its step.
        if step == 0:
            same_losses.append(torch.equal(loss.detach(), wanted[rank()]))
        torch.testing.assert_close(loss.detach(), wanted[rank()], rtol=1e-4, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(sharded, mine[rank()])  # a line without a backward
    assert_same_parameters(sharded, plain, rtol=1e-3, atol=2e-4)
    state = {k: v.clone().mul_(0.5) for k, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    sharded.load_state_dict(state)
    with torch.no_grad():
        same_losses.append(torch.equal(loss_of(sharded, mine[0]), loss_of(plain, mine[0])))
    stats = runtime.stats()
    return {"transport": (stats.transport, stats.transport_reason), "same": same_losses, "hits": stats.hit_rate > 0.5}


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_a_model_trains_as_the_unsharded_one(pair: RankPool, keep_bytes: int) -> None:
    wanted = {"transport": ("copy_engine", "asked for"), "same": [True] * 2, "hits": True}
    assert pair.run(train_both, keep_bytes, timeout=100) == [wanted] * 2


def train_with_a_compute_copy() -> list[bool]:
    """fp32 weights, bf16 GEMMs: what is gathered is always the current weight, rounded."""
    device = device_of_rank()
    torch.manual_seed(0)
    model = Model().to(device)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.bfloat16()
    gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(transport="copy_engine", param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    weight, same = model.head.weight, []
    for step in range(4):
        loss_of(model, batches(step, device)[rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        (full,) = [weight.materialize_group_for_forward()]
        same.append(torch.equal(full, weight.full_tensor().bfloat16()))
        del full
    return same


def test_a_model_trains_with_a_compute_copy_in_peer_memory(pair: RankPool) -> None:
    assert pair.run(train_with_a_compute_copy, timeout=100) == [[True] * 4] * 2


def graphed_training() -> list[bool]:
    """Forward, backward and optimizer in one graph, against the same steps run eagerly."""
    device = device_of_rank()
    torch.manual_seed(0)
    models = [Model().to(device), Model().to(device)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(transport="copy_engine"))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, capturable=True, foreach=True) for m in models]
    ids = batches(0, device)[rank()].clone()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(3):
                step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_loss = step(models[1], optimizers[1])
    same = []
    for index in range(5):
        ids.copy_(batches(index + 1, device)[rank()])
        loss = step(models[0], optimizers[0])
        graph.replay()
        same.append(torch.equal(loss, captured_loss))
    same += [
        torch.equal(
            a.full_tensor() if isinstance(a, gtp.GTPWeight) else a,
            b.full_tensor() if isinstance(b, gtp.GTPWeight) else b,
        )
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    ]
    torch.cuda.synchronize()
    return same


def test_a_graphed_training_step_equals_the_eager_one(pair: RankPool) -> None:
    for same in pair.run(graphed_training, timeout=100):
        assert all(same), same

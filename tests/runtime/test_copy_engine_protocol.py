"""The copy engine's protocol, without a GPU: every rank's streams are simulated and run in random order.

What a GPU test cannot show by luck is searched for here: a gather that reads a shard too early or too late, a mailbox
written while it is read, a lost signal, a deadlock. `test_copy_engine.py` has the same scenarios on real streams.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp.errors import GTPStateError
from gtp.runtime import copy_engine, copy_plans
from gtp.runtime.copy_engine import CopyEngineTransport
from gtp.runtime.group import Member, WeightGroup
from tests.runtime.simulated_streams import (
    Deadlock,
    FakeGroup,
    Machine,
    Operation,
    SimulatedAdder,
    SimulatedDriver,
)

_CPU = torch.device("cpu")


@dataclasses.dataclass
class Rank:
    """One simulated rank: a transport over some weights, and the values they should have."""

    rank: int
    driver: SimulatedDriver
    transport: CopyEngineTransport
    groups: list[WeightGroup]
    seen: list[list[torch.Tensor]]  # per check, what was gathered

    def gather(self, group: WeightGroup, after: Sequence[int] = ()) -> tuple[Any, list[torch.Tensor]]:
        outs = [torch.full(m.padded_shape(group.size), -1.0, dtype=group.compute_dtype) for m in group.members]
        events = [types.SimpleNamespace(cuda_event=event) for event in after]
        return self.transport.start_gather(group, outs, events), outs

    def use(self, ticket: Any, outs: list[torch.Tensor]) -> None:
        self.transport.finish_gather(ticket)
        copies = [torch.empty_like(out) for out in outs]
        self.seen.append(copies)
        self.driver.compute(lambda: [copy.copy_(out) for copy, out in zip(copies, outs, strict=True)])

    def write_shards(self, amount: float) -> None:
        """An optimizer step, in two halves, so that a reader in between is seen."""
        for group in self.groups:
            for member in group.members:
                for half in member.shard.view(-1).chunk(2):
                    self.driver.compute(lambda half=half: half.add_(amount), "optimizer")

    def wgrads(self, group: WeightGroup, value: float) -> list[torch.Tensor]:
        """wgrads whose every element says who made it, for what and when."""
        outs = [torch.empty(m.padded_shape(group.size), dtype=group.compute_dtype) for m in group.members]
        for index, out in enumerate(outs):
            filled = _wgrad(out, self.rank, group.index, index, value)
            self.driver.compute(lambda out=out, filled=filled: out.copy_(filled), "wgrad")
        return outs


def _wgrad(like: torch.Tensor, rank: int, group: int, member: int, value: float) -> torch.Tensor:
    rows = torch.arange(like.shape[0], dtype=torch.float32).view(-1, *[1] * (like.dim() - 1))
    return ((rank + 1) * 1000 + group * 100 + member * 10 + value + rows).expand(like.shape).to(like.dtype)


def make_ranks(
    machine: Machine,
    over: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[tuple[int, int]]],
    shown: Sequence[int] = (),
) -> list[Rank]:
    """Per weight group the ranks it is sharded over, and its members' shard shapes; and which ones users see."""
    ranks = []
    for rank in range(machine.ranks):
        driver = SimulatedDriver(machine, rank)
        adder = type("Adder", (SimulatedAdder,), {"driver": driver})
        transport = CopyEngineTransport(
            _CPU,
            driver=driver,
            make_arena=driver.make_arena,
            adder=adder,
            pages=(machine.pages, machine.paged_arena),
        )
        process_groups: dict[tuple[int, ...], FakeGroup] = {}
        groups = []
        for members_over, member_shapes in zip(over, shapes, strict=True):
            if rank not in members_over:
                continue
            key = tuple(members_over)
            group = process_groups.setdefault(key, FakeGroup(str(key), members_over, rank))
            index = len(groups)
            members = []
            for position, (rows, columns) in enumerate(member_shapes):
                shard = torch.full((rows, columns), float(100 * index + 10 * position + rank))
                members.append(
                    Member(f"w{index}.{position}", rows * group.size(), rows, (columns,), shard, shard, lambda: None)
                )
            axes = (group, group.rank(), group.size(), None)
            groups.append(WeightGroup(index, f"w{index}", members, *axes, torch.float32, shown=index in shown))
        transport.prepare(groups)
        ranks.append(Rank(rank, driver, transport, groups, []))
    return ranks


def expected_full(group: WeightGroup, member: int, ranks: Sequence[int], steps: float) -> torch.Tensor:
    rows, columns = group.members[member].shard_rows, group.members[member].trailing[0]
    return torch.cat([torch.full((rows, columns), 100.0 * group.index + 10 * member + r + steps) for r in ranks])


def expected_sum(group: WeightGroup, member: int, ranks: Sequence[int], value: float, rank: int) -> torch.Tensor:
    shape = group.members[member].padded_shape(group.size)
    total = sum(_wgrad(torch.empty(shape), r, group.index, member, value) for r in ranks)
    rows = group.members[member].shard_rows
    position = list(ranks).index(rank)
    return total[position * rows : (position + 1) * rows]


def train_step(me: Rank, step: int, grads: dict[tuple[int, int, int], torch.Tensor], ahead: int = 2) -> None:
    """Forward, backward and optimizer of one rank: gathers some weights ahead, reductions finished at the end."""
    me.transport.open(me.groups)
    order = [*me.groups, *reversed(me.groups)]
    flying: list[Any] = []
    reductions = []
    for position, group in enumerate(order):
        while len(flying) <= ahead and position + len(flying) < len(order):
            flying.append(me.gather(order[position + len(flying)]))
        me.use(*flying.pop(0))
        if position >= len(me.groups):
            wgrads = me.wgrads(group, step)
            into = [torch.full(m.shard.shape, 0.5) for m in group.members]
            accumulate = [member % 2 == 1 for member in range(len(group.members))]
            reductions.append((me.transport.start_reduce(group, wgrads, into, accumulate, 1), wgrads))
            for member, target in enumerate(into):
                grads[step, group.index, member] = target
            if len(reductions) > 2:
                finish(me, *reductions.pop(0))
    for reduction in reductions:
        finish(me, *reduction)
    me.transport.close()
    me.write_shards(1.0)


def finish(me: Rank, ticket: Any, wgrads: list[torch.Tensor]) -> None:
    me.transport.finish_reduce(ticket)
    # the buffers may be overwritten from here on
    me.driver.compute(lambda: [w.fill_(float("nan")) for w in wgrads], "reuse of wgrads")


def check(me: Rank, over: Sequence[Sequence[int]], steps: int, grads: dict[tuple[int, int, int], torch.Tensor]) -> None:
    mine = [ranks for ranks in over if me.rank in ranks]
    seen = iter(me.seen)
    for step in range(steps):
        for group in [*me.groups, *reversed(me.groups)]:
            for member, full in enumerate(next(seen)):
                assert torch.equal(full, expected_full(group, member, mine[group.index], step))
        for group in me.groups:
            for member in range(len(group.members)):
                want = expected_sum(group, member, mine[group.index], step, me.rank) + 0.5 * (member % 2)
                assert torch.equal(grads[step, group.index, member], want)


WORLDS = {
    "pair": (2, [(0, 1)] * 4),
    "trio": (3, [(0, 1, 2)] * 3),
    "four in one": (4, [(0, 1, 2, 3)] * 3),
    "two axes": (4, [(0, 1, 2, 3), (0, 1), (2, 3), (0, 1, 2, 3)]),
    "crossed axes": (4, [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1), (2, 3)]),
    "alone and together": (2, [(0,), (1,), (0, 1)]),
}


@pytest.mark.parametrize("serial", [False, True], ids=["parallel", "serial"])
@pytest.mark.parametrize("world", WORLDS)
@given(seed=st.integers(0, 2**31), mailbox=st.sampled_from([1024, 8192, 1 << 20]))
@settings(max_examples=8)
def test_training_is_exact_in_any_order_of_events(world: str, serial: bool, seed: int, mailbox: int) -> None:
    count, over = WORLDS[world]
    shapes = [[(3, 7)] if i % 3 else [(2, 5), (40, 33), (1, 1)] for i in range(len(over))]
    machine = Machine(count, serial=serial)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine, "MAILBOX_BYTES", mailbox)  # small ones cut weights into several messages
        ranks = make_ranks(machine, over, shapes)
    steps, grads = 3, [{} for _ in ranks]
    for me in ranks:
        for step in range(steps):
            train_step(me, step, grads[me.rank])
    machine.run(seed)
    for me in ranks:
        check(me, over, steps, grads[me.rank])


@given(seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_reductions_in_flight_are_exact_where_lines_end_and_begin_in_between(seed: int) -> None:
    """A shard that is written in mid-backward interrupts its line, and what is on its way then still is."""
    ranks = make_ranks(Machine(3), [(0, 1, 2)] * 2, [[(30, 20)], [(9, 4)]])
    grads: list[list[torch.Tensor]] = [[] for _ in ranks]
    for me in ranks:
        flying = []
        for value in range(7):
            me.transport.open(me.groups)
            for group in me.groups[: 1 + value % 2]:  # now one, now two of them before the next line
                wgrads = me.wgrads(group, value)
                into = [torch.empty(m.shard.shape) for m in group.members]
                flying.append((me.transport.start_reduce(group, wgrads, into, [False], 1), wgrads))
                grads[me.rank] += into
            me.transport.close()
        for reduction in flying:
            finish(me, *reduction)
    ranks[0].driver.machine.run(seed)
    for me, found in zip(ranks, grads, strict=True):
        got = iter(found)
        for value in range(7):
            for group in me.groups[: 1 + value % 2]:
                assert torch.equal(next(got), expected_sum(group, 0, (0, 1, 2), value, me.rank))


@pytest.mark.parametrize("serial", [False, True], ids=["parallel", "serial"])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=6)
def test_a_graph_of_a_whole_step_replays_and_mixes_with_eager_steps(serial: bool, seed: int) -> None:
    count, over = WORLDS["trio"]
    shapes = [[(3, 7)], [(2, 5), (40, 33)], [(9, 4)]]
    machine = Machine(count, serial=serial)
    ranks = make_ranks(machine, over, shapes)
    grads: list[dict[tuple[int, int, int], torch.Tensor]] = [{} for _ in ranks]
    found: list[list[torch.Tensor]] = [[] for _ in ranks]
    for me in ranks:
        train_step(me, 0, grads[me.rank])
        me.driver.begin_capture()
        train_step(me, 1, grads[me.rank])
        graph = me.driver.end_capture()
        captured = me.seen[len(me.groups) * 2 :]

        def note(me: Rank = me, captured: list[list[torch.Tensor]] = captured) -> None:
            found[me.rank].append(torch.stack([c[0][0, 0] for c in captured]))

        for replay in range(3):
            me.driver.replay(graph, seed + 7 * me.rank + replay)
            me.driver.compute(note)
        train_step(me, 4, grads[me.rank])
    machine.run(seed)
    for me in ranks:
        for replay, values in enumerate(found[me.rank]):
            order = [*me.groups, *reversed(me.groups)]
            assert values.tolist() == [100.0 * g.index + 1 + replay for g in order]
        for step in (0, 1, 4):  # the graph's gradients are those of its last replay, all alike
            for group in me.groups:
                want = expected_sum(group, 0, over[group.index], step, me.rank)
                assert torch.equal(grads[me.rank][step, group.index, 0], want)
        last = me.seen[-1]
        assert torch.equal(last[0], expected_full(me.groups[0], 0, over[0], 4))


def _before(node: Operation) -> set[int]:
    """All that a graph runs before a node."""
    found: set[int] = set()
    todo = list(node.after)
    while todo:
        earlier = todo.pop()
        if id(earlier) not in found:
            found.add(id(earlier))
            todo.extend(earlier.after)
    return found


def test_in_a_graph_a_ranks_own_shard_is_copied_beside_those_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on streams of their own; neither waits for the other, gather after gather."""
    monkeypatch.setattr(copy_plans, "SPLIT_BYTES", 0)
    (me, _) = make_ranks(Machine(2), [(0, 1)] * 3, [[(30, 20)]] * 3)
    me.driver.begin_capture()
    me.transport.open(me.groups)
    tickets, copies = [], []
    for group in me.groups:
        before = len(me.driver.captured)
        tickets.append(me.gather(group))
        copies.append([node for node in me.driver.captured[before:] if node.what.startswith("copy")])
    for ticket, outs in tickets:
        me.use(ticket, outs)
    me.transport.close()
    me.driver.end_capture()
    for gathered in copies:
        streams = {node.stream for node in gathered}
        assert len(gathered) == 4  # a copy is simulated in two pieces
        assert len(streams) == 2
        for node in gathered:
            others = {id(other) for other in gathered if other.stream != node.stream}
            assert not others & _before(node)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=40)
def test_a_graph_of_one_layer_replays_inside_an_eager_line(seed: int) -> None:
    machine = Machine(2)
    over = [(0, 1)] * 3
    ranks = make_ranks(machine, over, [[(30, 20)]] * 3)
    results: list[list[torch.Tensor]] = []
    for me in ranks:
        layer = me.groups[1]
        me.driver.begin_capture()
        me.transport.open([layer])
        me.use(*me.gather(layer))
        inside = [torch.empty(30, 20)]
        wgrads = me.wgrads(layer, 5)
        finish(me, me.transport.start_reduce(layer, wgrads, inside, [False], 1), wgrads)
        me.transport.close()
        graph = me.driver.end_capture()

        eager: list[torch.Tensor] = []
        for _ in range(2):
            me.transport.open(me.groups)
            ticket = me.gather(me.groups[2])
            wgrads = me.wgrads(me.groups[0], 6)
            eager.append(torch.empty(30, 20))
            reduction = me.transport.start_reduce(me.groups[0], wgrads, eager[-1:], [False], 1)
            me.driver.replay(graph)
            me.use(*ticket)
            finish(me, reduction, wgrads)
            me.transport.close()
        results.append([inside[0], *eager])
    machine.run(seed)
    for me, (inside_grad, *eager_grads) in zip(ranks, results, strict=True):
        assert torch.equal(me.seen[0][0], expected_full(me.groups[1], 0, (0, 1), 0))
        assert torch.equal(inside_grad, expected_sum(me.groups[1], 0, (0, 1), 5, me.rank))
        for grad in eager_grads:
            assert torch.equal(grad, expected_sum(me.groups[0], 0, (0, 1), 6, me.rank))


@given(seed=st.integers(0, 2**31))
@settings(max_examples=8)
def test_replicated_gradients_are_summed_over_each_group_in_turn(seed: int) -> None:
    machine = Machine(4)
    over = [(0, 1), (2, 3), (0, 2), (1, 3)]
    ranks = make_ranks(machine, over, [[(3, 7)]] * 4)
    flats = []
    for me in ranks:
        flat = torch.arange(1000, dtype=torch.float32) + 10**me.rank
        groups = [group.process_group for group in me.groups]
        me.transport.finish_all_reduce(me.transport.start_all_reduce(flat, groups))
        flats.append(flat)
    machine.run(seed)
    for flat in flats:
        assert torch.equal(flat, 4 * torch.arange(1000, dtype=torch.float32) + 1111)


def test_the_simulation_finds_a_gather_without_the_line() -> None:
    """The tests above would see a missing "finished reading": with no wait at close, some order reads a torn shard."""
    torn = 0
    for seed in range(30):
        machine = Machine(2)
        ranks = make_ranks(machine, [(0, 1)] * 2, [[(30, 20)]] * 2)
        for me in ranks:
            for domain in me.transport._domains.values():
                domain._closing = [[] for _ in domain._closing]
            for _ in range(2):
                me.transport.open(me.groups)
                for group in me.groups:
                    me.use(*me.gather(group))
                me.transport.close()
                me.write_shards(1.0)
        try:
            machine.run(seed)
        except Deadlock:
            torn += 1
            continue
        for me in ranks:
            for index, copies in enumerate(me.seen):
                want = expected_full(me.groups[index % 2], 0, (0, 1), index // 2)
                torn += not torch.equal(copies[0], want)
    assert torn > 0


def test_a_rank_that_does_not_come_is_a_deadlock_that_names_the_flag() -> None:
    machine = Machine(2)
    ranks = make_ranks(machine, [(0, 1)], [[(3, 7)]])
    train_step(ranks[0], 0, {})
    with pytest.raises(Deadlock, match="rank 0 stream"):
        machine.run(0)


def test_gathers_outside_of_a_line_are_refused() -> None:
    machine = Machine(1)
    (me,) = make_ranks(machine, [(0,)], [[(3, 7)]])
    with pytest.raises(GTPStateError, match="w0: gathered outside of a line"):
        me.gather(me.groups[0])
    me.transport.open(me.groups)
    with pytest.raises(GTPStateError, match="opened twice"):
        me.transport.open(me.groups)


def test_shards_move_to_peer_memory_and_a_parameter_that_left_it_is_published() -> None:
    machine = Machine(2)
    ranks = make_ranks(machine, [(0, 1)], [[(3, 7)]])
    for me in ranks:
        (member,) = me.groups[0].members
        (domain,) = me.transport._domains.values()
        assert member.shard.data_ptr() == domain.address(member, me.rank)
        moved = torch.full((3, 7), 50.0 + me.rank)
        member.shard = member.send = moved  # what the runtime does when somebody re-points the parameter
        me.transport.open(me.groups)
        me.use(*me.gather(me.groups[0]))
        me.transport.close()
        assert member.send is moved
    machine.run(3)
    for me in ranks:
        assert me.seen[0][0][:, 0].tolist() == [50.0] * 3 + [51.0] * 3


def test_wgrads_of_unlike_dtypes_are_refused_however_often_the_group_was_reduced_before() -> None:
    machine = Machine(1)
    (me,) = make_ranks(machine, [(0,)], [[(3, 4), (3, 4)]])
    into = [torch.zeros(3, 4), torch.zeros(3, 4)]
    me.transport.open(me.groups)
    alike = [torch.ones(3, 4), torch.ones(3, 4)]
    me.transport.start_reduce(me.groups[0], alike, into, [False] * 2, 1)
    machine.run(0)
    assert [total.unique().tolist() for total in into] == [[1.0], [1.0]]
    mixed = [torch.ones(3, 4), torch.ones(3, 8, dtype=torch.bfloat16)]  # as many bytes: no read out of bounds here
    with pytest.raises(GTPStateError, match=r"w0: the wgrads of one group must have one dtype, got torch\.bfloat16, t"):
        me.transport.start_reduce(me.groups[0], mixed, into, [False] * 2, 1)


def test_memory_that_gets_a_gradient_lives_until_the_addition_is_done() -> None:
    """A frozen weight of a group gets its gradient into memory that nobody wants; nobody else may have it before."""
    (me,) = make_ranks(Machine(1), [(0,)], [[(3, 4), (3, 4)]])
    me.transport._mail._adders[0, 1] = lambda *args: None  # as the kernel: it keeps nothing of what it is given
    into = [torch.zeros(3, 4), torch.zeros(3, 4)]
    alive = [weakref.ref(target) for target in into]
    ticket = me.transport.start_reduce(me.groups[0], me.wgrads(me.groups[0], 1.0), into, [False] * 2, 1)
    del into
    assert all(target() is not None for target in alive)
    me.transport.finish_reduce(ticket)
    del ticket
    assert all(target() is None for target in alive)


def test_a_target_that_is_not_contiguous_is_refused() -> None:
    machine = Machine(1)
    (me,) = make_ranks(machine, [(0,)], [[(3, 4)]])
    wgrads = me.wgrads(me.groups[0], 1.0)
    with pytest.raises(GTPStateError, match=r"w0\.0: .* strides \(1, 3\).*Give the weight a contiguous main_grad"):
        me.transport.start_reduce(me.groups[0], wgrads, [torch.zeros(4, 3).t()], [True], 1)

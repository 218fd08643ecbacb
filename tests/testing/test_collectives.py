"""Late, logged and delayed collectives, on two gloo ranks: each must show the mistake that it is made for."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from gtp.errors import GTPValueError
from gtp.testing import ranks as rank_api
from gtp.testing.collectives import (
    CollectiveLog,
    RaceError,
    collective_log,
    delayed_collectives,
    late_collectives,
)
from gtp.testing.ranks import RankPools

LAYERS = 4


def shard_of(layer: int) -> torch.Tensor:
    return torch.full((2, 3), float(10 * layer + rank_api.rank()))


def full_of(layer: int) -> torch.Tensor:
    return torch.cat([torch.full((2, 3), float(10 * layer + r)) for r in range(2)])


def prefetch_loop(buffer_count: int) -> list[torch.Tensor]:
    """A toy: while layer i is read, layer i + 1 is gathered into the next buffer, which may be the same one."""
    buffers = [torch.empty(4, 3) for _ in range(buffer_count)]
    seen = []
    work = dist.all_gather_into_tensor(buffers[0], shard_of(0), async_op=True)
    for layer in range(LAYERS):
        work.wait()
        if layer + 1 < LAYERS:
            work = dist.all_gather_into_tensor(buffers[(layer + 1) % buffer_count], shard_of(layer + 1), async_op=True)
        seen.append(buffers[layer % buffer_count].clone())
    return seen


def late_prefetch_loop(buffer_count: int) -> list[torch.Tensor]:
    with late_collectives():
        return prefetch_loop(buffer_count)


def every_kind() -> list[torch.Tensor]:
    """Each entry point, async, its result right after the wait."""
    mine = float(rank_api.rank())
    results = []

    def take(work: dist.Work, *outputs: torch.Tensor) -> None:
        work.wait()
        results.extend(t.clone() for t in outputs)

    out = torch.empty(4)
    take(dist.all_gather_into_tensor(out, torch.full((2,), mine), async_op=True), out)
    out = torch.empty(2)
    take(dist.reduce_scatter_tensor(out, torch.arange(4.0) + mine, async_op=True), out)
    out = torch.empty(4)
    take(dist.all_to_all_single(out, torch.arange(4.0) + 10 * mine, async_op=True), out)
    out = torch.full((2,), mine + 1)
    take(dist.all_reduce(out, op=dist.ReduceOp.MAX, async_op=True), out)
    out = torch.full((2,), mine, dtype=torch.bfloat16)
    take(dist.broadcast(out, src=1, async_op=True), out)
    outs = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    take(dist.all_gather(outs, torch.tensor([7 + rank_api.rank()]), async_op=True), *outs)
    out = torch.empty(2)
    halves = [torch.full((2,), mine), torch.full((2,), mine + 5)]
    take(dist.reduce_scatter(out, halves, async_op=True), out)
    return results


def late_every_kind() -> list[torch.Tensor]:
    with late_collectives():
        return every_kind()


def read_before_wait() -> tuple[torch.Tensor, torch.Tensor, bool, bool]:
    with late_collectives():
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.2)
        early, completed = x.clone(), work.is_completed()
        work.wait()
        work.wait()
        return early, x, completed, work.is_completed()


def race_on_input() -> str:
    source, out = torch.ones(2), torch.empty(4)
    with late_collectives():
        work = dist.all_gather_into_tensor(out, source, async_op=True)
        source += 1
        with pytest.raises(RaceError) as caught:
            work.wait()
    return str(caught.value)


def race_on_output() -> str:
    source, out = torch.ones(2), torch.empty(4)
    with late_collectives():
        work = dist.all_gather_into_tensor(out, source, async_op=True)
        out[0] = 3.0
        with pytest.raises(RaceError) as caught:
            work.wait()
    return str(caught.value)


def gather_in_place() -> torch.Tensor:
    """The input is a slice of the output, as ZeRO and FSDP do it."""
    out = torch.zeros(4)
    mine = out[2 * rank_api.rank() : 2 * rank_api.rank() + 2]
    mine += 1 + rank_api.rank()
    with late_collectives():
        dist.all_gather_into_tensor(out, mine, async_op=True).wait()
    return out


def never_waited() -> str:
    x = torch.ones(2)
    with pytest.raises(RaceError) as caught, late_collectives():
        dist.all_reduce(x, async_op=True)
    return str(caught.value)


def coalesced(wait: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two gathers of different sizes as one collective: outputs before and after the manager's wait."""
    outs = [torch.zeros(4), torch.zeros(2, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outs[0], torch.full((2,), float(rank_api.rank())), async_op=True)
        dist.all_gather_into_tensor(outs[1], torch.full((1, 3), 5.0 + rank_api.rank()), async_op=True)
    before = [t.clone() for t in outs]
    if wait:
        manager.wait()
    return before, outs


def late_coalesced(wait: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with late_collectives():
        return coalesced(wait)


def late_in_synchronous_manager() -> str:
    out = torch.zeros(4)
    with pytest.raises(RaceError) as caught, late_collectives(), _coalescing_manager():
        dist.all_gather_into_tensor(out, torch.ones(2), async_op=True)
    return str(caught.value)


def logged() -> CollectiveLog:
    group = rank_api.subgroup((0, 1))
    with collective_log() as log:
        x = torch.zeros(3, dtype=torch.bfloat16)
        work = dist.all_gather_into_tensor(torch.empty(6, dtype=torch.bfloat16), x, group=group, async_op=True)
        log.mark("compute")
        work.wait()
        dist.all_reduce(torch.zeros(2, 2))
    dist.all_reduce(torch.zeros(5))
    return log


def logged_coalesced() -> list[str]:
    with collective_log() as log, late_collectives():
        coalesced(True)
    return log.lines()


def seconds_in_barrier(delay: float, kinds: tuple[str, ...]) -> float:
    dist.barrier()
    began = time.monotonic()
    with delayed_collectives(delay, rank=1, kinds=kinds):
        x = torch.ones(1)
        dist.all_reduce(x)
    assert x.item() == 2.0
    return time.monotonic() - began


def entry_points() -> list[bool]:
    before = dist.all_reduce, dist.distributed_c10d._CoalescingManager.wait
    with collective_log(), late_collectives(), delayed_collectives(0.0, rank=0):
        inside = dist.all_reduce
    after = dist.all_reduce, dist.distributed_c10d._CoalescingManager.wait
    return [before == after, inside is before[0]]


def unknown_kind() -> str:
    with pytest.raises(GTPValueError) as caught, delayed_collectives(1.0, rank=0, kinds=["all_reduc"]):
        pass
    return str(caught.value)


def test_one_buffer_for_two_gathers_is_seen_only_when_late(ranks: RankPools) -> None:
    """The control runs first: with two buffers the loop is right, late or not, so NaN below means the one buffer."""
    expected = [full_of(layer) for layer in range(LAYERS)]
    for seen in ranks(2).run(late_prefetch_loop, 2):
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    for seen in ranks(2).run(late_prefetch_loop, 1):
        assert [bool(t.isnan().all()) for t in seen] == [True] * (LAYERS - 1) + [False]


def test_every_kind_gives_the_same_when_late(ranks: RankPools) -> None:
    direct, late = ranks(2).run(every_kind), ranks(2).run(late_every_kind)
    expected = [[0, 0, 1, 1], [1, 3], [0, 1, 10, 11], [2, 2], [1, 1], [7], [8], [1, 1]]
    assert [t.tolist() for t in direct[0]] == expected
    assert [t.tolist() for t in direct[1]][1:3] == [[5, 7], [2, 3, 12, 13]]
    for a, b in zip(direct, late, strict=True):
        assert all(torch.equal(s, t) and s.dtype == t.dtype for s, t in zip(a, b, strict=True))


def test_nothing_arrives_before_the_wait(ranks: RankPools) -> None:
    for early, final, completed_early, completed in ranks(2).run(read_before_wait):
        assert early.isnan().all()
        assert final.tolist() == [2.0, 2.0]
        assert (completed_early, completed) == (False, True)


def test_changed_input_is_named(ranks: RankPools) -> None:
    message = "all_gather_into_tensor into (4,) float32: its input changed while it was in flight"
    assert ranks(2).run(race_on_input) == [message] * 2


def test_written_output_is_named(ranks: RankPools) -> None:
    message = "all_gather_into_tensor into (4,) float32: its output was written by somebody else while it was in flight"
    assert ranks(2).run(race_on_output) == [message] * 2


def test_input_inside_its_output_is_no_race(ranks: RankPools) -> None:
    assert [t.tolist() for t in ranks(2).run(gather_in_place)] == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_collective_that_nobody_waited_for_is_named(ranks: RankPools) -> None:
    for message in ranks(2).run(never_waited):
        assert message.startswith("1 collectives were started and never waited for, first all_reduce into (2,) float32")


def test_coalesced_gathers_arrive_at_the_managers_wait(ranks: RankPools) -> None:
    for before, after in ranks(2).run(late_coalesced, True):
        assert all(t.isnan().all() for t in before)
        assert [t.tolist() for t in after] == [[0.0, 0.0, 1.0, 1.0], [[5.0] * 3, [6.0] * 3]]
    with pytest.raises(RuntimeError, match="2 collectives were started and never waited for"):
        ranks(2).run(late_coalesced, False)


def test_async_call_in_a_synchronous_manager_is_refused(ranks: RankPools) -> None:
    for message in ranks(2).run(late_in_synchronous_manager):
        assert "async_op=True inside a synchronous coalescing manager" in message


def test_log_has_order_shapes_dtype_and_group(ranks: RankPools) -> None:
    for log in ranks(2).run(logged):
        assert log.lines() == [
            "start all_gather_into_tensor (6,)",
            "mark compute",
            "wait all_gather_into_tensor (6,)",
            "start all_reduce (2, 2)",
        ]
        gather, reduce = log.started()
        assert (gather.input_shape, gather.dtype, gather.group) == ((3,), torch.bfloat16, (0, 1))
        assert (gather.async_op, gather.coalesced, reduce.async_op) == (True, False, False)
        assert log.started("all_reduce") == [reduce]


def test_log_of_a_coalesced_block_has_one_wait(ranks: RankPools) -> None:
    assert (
        ranks(2).run(logged_coalesced)
        == [
            [
                "start all_gather_into_tensor (4,)",
                "start all_gather_into_tensor (2, 3)",
                "wait all_gather_into_tensor (4,)",
            ]
        ]
        * 2
    )


def test_late_rank_delays_the_kinds_asked_for(ranks: RankPools) -> None:
    # lower bounds only: a busy machine is slower, never faster
    assert min(ranks(2).run(seconds_in_barrier, 0.5, ("all_reduce",))) >= 0.45
    assert min(ranks(2).run(seconds_in_barrier, 30.0, ("broadcast",), timeout=60.0)) < 30.0


def test_entry_points_are_put_back(ranks: RankPools) -> None:
    assert ranks(2).run(entry_points) == [[True, False]] * 2


def test_unknown_kind_is_refused(ranks: RankPools) -> None:
    assert ranks(2).run(unknown_kind)[0].startswith("kinds: all_reduc unknown; there are all_gather_into_tensor, ")

"""Gathers, leases, reductions and an allocator that hands memory out anew at once, on simulated streams in any order.

`test_copy_engine_protocol.py` has the transport alone, with fresh memory for everything. Here memory is what it is on a
GPU: a buffer or a gradient that is let go belongs to somebody else in the order of the stream that let it go. What
still reads or writes it, and is not ordered before, is seen as a wrong number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp.config import GTPConfig
from gtp.runtime import copy_engine, copy_plans
from gtp.runtime.schedule import Phase
from tests.runtime.simulated_streams import Deadlock, Machine
from tests.runtime.simulated_training import Frozen, Trainer
from tests.runtime.test_copy_engine_protocol import make_ranks


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the program that every rank runs: eager, or a graph that is replayed so often."""

    order: list[int]
    second: frozenset[int]
    replays: int  # 0: eager
    layer: bool  # whether the graph of a layer is replayed inside (of an eager step)


def train(trainer: Trainer, steps: Sequence[Step], seed: int) -> None:
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
) -> list[Trainer]:
    over = _OVER[machine.ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine, "MAILBOX_BYTES", 4096)
        patch.setattr(copy_plans, "SPLIT_BYTES", 0)
        return [Trainer(me, over, config, limit, frozen) for me in make_ranks(machine, over, shapes)]


def _check(trainers: Sequence[Trainer]) -> None:
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


def _delete(trainer: Trainer, order: Sequence[int], time: int, raised: bool) -> None:
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

"""The copy-engine backend without a GPU: every rank's streams are simulated and run in random order.

What luck hides on a GPU is searched for here: rows read before they came, a slot filled while it is read, a lost
signal, a deadlock, work that a capture leaves unjoined. `test_collective_gpu.py` runs the same on real streams.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp.errors import GTPStateError
from gtp.ops.collective_backends import auto
from gtp.ops.collective_backends.auto import AutoBackend
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend
from gtp.ops.collective_backends.workspace import Workspace
from gtp.ops.peer import Handshake
from tests.ops.copy_engine_ranks import CPU, Ranks, capture, program, sizes
from tests.runtime.simulated_streams import Deadlock, FakeGroup, Machine, SimulatedDriver


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), ahead=st.sampled_from([None, 0, 1]))
def test_any_order_of_events_gives_the_products(size, split, seed, ahead):
    with sizes(split=split):
        ranks = Ranks(size, room=4 * 5 * 6 * 7 * 4)
        program(ranks)
        program(ranks, 20)
        ranks.finish(seed, ahead)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_one_hardware_queue_per_rank_does_not_deadlock(size, split):
    """The other extreme: each rank runs strictly in the order of queueing."""
    with sizes(split=split):
        ranks = Ranks(size, serial=True)
        program(ranks)
        program(ranks, 20)
        ranks.finish(0)


def test_the_workspace_grows_and_what_is_in_flight_survives():
    with sizes(split=True):
        ranks = Ranks(2)
        ranks.gather(1, 2, 2, [3], whole=True)
        first = [b._workspace for b in ranks.backends]
        ranks.finish(0)
        ranks.gather(2, 40, 20, [3], whole=True)
        ranks.scatter(3, 2, 2, [3])
        ranks.finish(1)
        assert all(b._workspace is not w for b, w in zip(ranks.backends, first, strict=True))
        assert ranks.backends[0]._kept == []  # no graph used it
        with pytest.raises(GTPStateError, match="a collective GEMM was started inside another one"):
            nested(ranks)


@pytest.mark.parametrize("split", [False, True])
def test_what_was_made_in_inference_mode_serves_training(split):
    with sizes(split=split):
        ranks = Ranks(2)
        for rows in (3, 30):  # the second makes the workspace grow
            with torch.inference_mode():
                ranks.scatter(1, rows, 7, [4])
                ranks.finish(0)
            for _ in range(2):
                ranks.scatter(2, rows, 7, [4])
            ranks.finish(1)


def nested(ranks: Ranks) -> None:
    with ranks.on(0) as backend, backend.gather(torch.ones(2, 2)):
        backend.matmul_reduce_scatter([(torch.ones(4, 2), torch.ones(2, 2))])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), between=st.lists(st.booleans(), min_size=2, max_size=5))
def test_graphs_and_eager_code_take_turns(size, serial, split, seed, between):
    """A graph replayed several times, eager operations in between: no value is baked in that a replay would trip over,
    nothing captured is left unjoined. Checks of captured operations look at the last replay."""
    with sizes(split=split):
        ranks = Ranks(size, serial=serial)
        program(ranks)  # warm-up
        ranks.finish(seed)

        def captured() -> None:
            ranks.gather(31, 4, 6, [5], whole=True, columns=True)
            ranks.scatter(32, 3, 7, [4, 2])
            ranks.gather(33, 2, 6, [5], transposed=True)

        graphs = capture(ranks, captured)
        # operands of a replay are what they were at the capture: undo the scribbling of the one before
        shards = [t for t in ranks.alive if t.shape in ((4, 6), (2, 6))]
        before = [t.clone() for t in shards]
        checks, ranks.checks = ranks.checks, []
        for eager in between:
            for rank, driver in enumerate(ranks.drivers):
                if rank == 0:
                    driver.compute(lambda: None)
                driver.replay(graphs[rank], seed)
            if eager:
                program(ranks, 40)
            ranks.machine.run(seed + 1)
            for check in [*checks, *ranks.checks]:
                check()
            ranks.checks.clear()
            for t, value in zip(shards, before, strict=True):
                t.copy_(value)


@pytest.mark.parametrize("size", [2, 3])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), replaying=st.integers(0, 2))
def test_a_rank_in_parts_meets_ranks_in_one(size, seed, replaying):
    """How an operation is queued is each rank's own affair: the moves are the same."""
    with sizes(split=False):
        ranks = Ranks(size, room=1 << 12)
        driver = ranks.drivers[replaying % size]
        driver.begin_capture()  # graphs are cut, eager code is not
        for turn in range(3):
            ranks.scatter(7 + turn, 3, 4, [2])
        driver.replay(driver.end_capture(), seed)
        ranks.finish(seed)


@pytest.mark.parametrize("size", [2, 3])
def test_the_stream_that_multiplies_waits_for_no_signal(size):
    """Of operations in parts. A peer's signal takes a stream longer than an event does, and this stream's next GEMM
    would wait that long."""
    with sizes(split=True):
        ranks = Ranks(size)
        program(ranks)  # warm-up
        queues = ranks.machine.queues
        eager = [op for (_, stream), queue in queues.items() for op in queue if _is_main(ranks, stream)]
        ranks.finish(0)
        captured = [node for graph in capture(ranks, lambda: program(ranks, 40)) for node in graph.nodes]
        in_graph = [node for node in captured if _is_main(ranks, node.stream)]
    for queued in (eager, in_graph):
        assert sum("sum_of_products" in op.what for op in queued) == size * size * 4
        assert not [op.what for op in queued if op.what.startswith("flag")]
    assert any(node.what.startswith("flag") for node in captured)


def _is_main(ranks: Ranks, stream: int) -> bool:
    return stream in [driver.main for driver in ranks.drivers]


def test_short_operations_make_every_move():
    """Among themselves they would stay in order without consent to send; in turn with graphs they would not."""
    with sizes(split=False):
        ranks = Ranks(3)
        ranks.scatter(1, 3, 4, [2])
        ranks.gather(2, 3, 4, [2], known=True)
        for rank, driver in enumerate(ranks.drivers):
            queued = [op.what for op in ranks.machine.queues[rank, driver.main]]
            assert len([what for what in queued if what.startswith("flag")]) == 2 * 2 * (3 - 1)
            assert not [what for what in queued if what.startswith(("record", "wait"))]
        ranks.finish(0)


def test_a_capture_that_would_grow_the_workspace_is_refused():
    ranks = Ranks(2)
    ranks.gather(1, 2, 2, [3], whole=True)
    ranks.finish(0)
    driver = ranks.drivers[0]
    driver.begin_capture()
    with (
        ranks.on(0) as backend,
        pytest.raises(GTPStateError, match="Run forward and backward once at the largest size"),
    ):
        backend.matmul_reduce_scatter([(torch.ones(400, 2), torch.ones(2, 2))])


def test_c77_graphs_stay_right_when_the_workspace_grows_after_their_capture():
    """C77. Their memory is kept; a larger eager call uses new memory."""
    with sizes(split=True):
        ranks = Ranks(2)
        ranks.scatter(1, 3, 4, [2])
        ranks.finish(0)
        graphs = capture(ranks, lambda: ranks.scatter(2, 3, 4, [2]))
        checks, ranks.checks = ranks.checks, []
        old = [b._workspace for b in ranks.backends]
        ranks.gather(3, 40, 20, [3], whole=True)
        assert [b._kept for b in ranks.backends] == [[w] for w in old]
        for turn in range(3):
            for driver, graph in zip(ranks.drivers, graphs, strict=True):
                driver.replay(graph)
            ranks.scatter(4 + turn, 6, 20, [3])
            ranks.finish(turn)
            for check in checks:
                check()


def test_every_wait_for_a_peer_is_watched():
    """By the word that a stream waits for, and in words that say what the peer has not done."""
    machine = Machine(3)
    driver = SimulatedDriver(machine, 1)
    markers = torch.zeros(64, dtype=torch.int32)
    watched: list[tuple[str, dict[int, int]]] = []

    def watch(owner: Workspace, absent: str, flags: dict[int, int]) -> int:
        watched.append((absent, dict(flags)))
        return markers.data_ptr() + 4 * len(watched)

    group = FakeGroup("tp", range(3), 1)
    workspace = Workspace(driver, group, 1024, driver.make_arena, watch)  # type: ignore[arg-type]
    sent, taken = "to send its part of a collective GEMM", "to take what was sent to it for one"
    words = 6  # of a slot: `full` by sender, then `empty` by receiver
    for slot in range(2):
        for peer in (0, 2):
            assert (sent, {peer: slot * words + peer}) in watched
            assert (taken, {peer: slot * words + 3 + peer}) in watched
    # a wait of this rank alone: marked while it lasts, and not after it
    workspace.flags().fill_(0)
    slot = workspace.next_slot()
    ((batch, step),) = slot.posts[1]  # of three ranks, the first post waits for nothing
    driver.submit(batch, driver.main)
    assert step is None
    machine.run(0)
    (batch, _), (last, _) = slot.posts[2]
    driver.submit(last, driver.main)
    with pytest.raises(Deadlock):
        machine.run(0)
    assert int(markers.sum()) == 1
    workspace.flags().fill_(1)  # what the watchdog does in the end
    machine.run(0)
    assert int(markers.sum()) == 0


def test_full_rows_must_be_announced():
    ranks = Ranks(2)
    with ranks.on(0) as backend, backend.gather(torch.ones(2, 2)) as gathering:
        with pytest.raises(GTPStateError, match="was not started with whole=True"):
            gathering.full()


def test_auto_takes_a_collective_for_small_reduce_scatters_in_eager_code_only():
    """By the size of a product, so that all ranks decide alike; and never inside a graph."""
    machine = Machine(2)
    driver = SimulatedDriver(machine, 0)
    group = FakeGroup("tp", range(2), 0)
    backend = AutoBackend(group, CPU, driver=driver, make_arena=driver.make_arena)  # type: ignore[arg-type]
    backend._agreement = None
    small, large = [(torch.empty(4, 8), torch.empty(8, 6))], [(torch.empty(1 << 13, 4), torch.empty(4, 6))]
    with (
        mock.patch.object(auto, "EAGER_SCATTER_FLOP", 2.0 * 1000 * 4 * 6),
        mock.patch.object(auto, "multiply_then_scatter", return_value="collective"),
        mock.patch.object(CopyEngineBackend, "matmul_reduce_scatter", return_value="copies"),
    ):
        took = [backend.matmul_reduce_scatter(products) for products in (small, large, small * 400)]
        # the eager call has made room for a graph: this is what a warm-up is for
        assert backend._workspace.capacity >= 4 * 6 * 4
        driver.begin_capture()
        took.append(backend.matmul_reduce_scatter(small))
    assert took == ["collective", "copies", "copies", "copies"]


# --- the tests can fail


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("broken", ["await_ops", "release_ops", "reclaim_ops"])
def test_a_protocol_with_one_step_left_out_is_caught(broken, split):
    """Each step of the protocol, taken away, fails under some order of events, most of all with a rank far ahead.

    Replays of a graph with one operation use one slot again and again, and nothing else keeps ranks apart.
    """

    def fails(seed: int) -> bool:
        ranks = Ranks(2)
        ranks.scatter(1, 3, 4, [2])
        try:
            ranks.finish(seed)
            graphs = capture(ranks, lambda: ranks.scatter(2, 3, 4, [2]))
            for driver, graph in zip(ranks.drivers, graphs, strict=True):
                for _ in range(4):
                    driver.replay(graph)
            ranks.finish(seed, ahead=seed % 3)  # one of them, or none
        except (AssertionError, Deadlock):
            return True
        return False

    with sizes(split=split):
        assert not any(fails(seed) for seed in range(10))
        with mock.patch.object(Handshake, broken, return_value=[]):
            assert any(fails(seed) for seed in range(40))

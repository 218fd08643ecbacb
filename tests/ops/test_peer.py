"""Peer building blocks without a GPU: the driver's structures, the four moves of a handshake, refusals."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gtp.ops.peer import WORD, Handshake, LocalArena, Wait, Write, aligned, why_not
from gtp.ops.peer import driver as peer_driver
from gtp.ops.peer.driver import signal_batch
from gtp.testing.ranks import rank, subgroup
from tests.runtime.simulated_streams import Machine, SimulatedDriver


def test_signal_operations_have_the_layout_of_the_cuda_driver() -> None:
    """Against cuda.bindings, which is generated from the driver's header."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    kinds, flags = cuda.CUstreamBatchMemOpType, cuda.CUstreamWaitValue_flags
    assert int(kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32) == peer_driver.WAIT_VALUE_32
    assert int(kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32) == peer_driver.WRITE_VALUE_32
    assert int(flags.CU_STREAM_WAIT_VALUE_EQ) == peer_driver.WAIT_EQUAL
    assert int(cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT) == peer_driver.WRITE_DEFAULT

    batch = signal_batch([Wait(0x1122334455667788, 7), Write(0x99AABBCCDDEEFF00, 9)])
    theirs = cuda.CUstreamBatchMemOpParams_union()
    raw = ctypes.string_at(ctypes.addressof(batch.operations), ctypes.sizeof(batch.operations))
    assert batch.count == 2
    assert len(raw) == 2 * 48
    ctypes.memmove(theirs.getPtr(), raw[:48], 48)
    assert int(theirs.operation) == peer_driver.WAIT_VALUE_32
    assert int(theirs.waitValue.address) == 0x1122334455667788
    assert int(theirs.waitValue.value) == 7
    assert theirs.waitValue.flags == peer_driver.WAIT_EQUAL
    ctypes.memmove(theirs.getPtr(), raw[48:], 48)
    assert int(theirs.operation) == peer_driver.WRITE_VALUE_32
    assert int(theirs.writeValue.address) == 0x99AABBCCDDEEFF00
    assert int(theirs.writeValue.value) == 9


def test_the_four_moves_meet_at_the_same_words() -> None:
    driver = SimulatedDriver(Machine(3), 0)
    words = [1000, 2000, 3000]
    hands = [Handshake(driver, r, words) for r in range(3)]
    # rank 2 posts into rank 0's and rank 1's memory, where they wait for rank 2
    assert hands[2].post_ops([0, 1]) == [Write(1000 + 2 * WORD, 1), Write(2000 + 2 * WORD, 1)]
    assert hands[1].await_ops([2]) == [Wait(2000 + 2 * WORD, 1), Write(2000 + 2 * WORD, 0)]
    # they release into rank 2's memory, where it waits for them
    assert hands[1].release_ops([2]) == [Write(3000 + (3 + 1) * WORD, 1)]
    assert hands[2].reclaim_ops([1]) == [Wait(3000 + (3 + 1) * WORD, 1), Write(3000 + (3 + 1) * WORD, 0)]
    assert [h.peers for h in hands] == [(1, 2), (2, 0), (0, 1)]  # staggered
    flags = {h.full_address(0, s) for h in hands for s in range(3)} | {
        h.empty_address(0, s) for h in hands for s in range(3)
    }
    assert len(flags) == Handshake.words_needed(3)


def test_a_watched_wait_is_marked_while_it_lasts() -> None:
    driver = SimulatedDriver(Machine(2), 0)
    asked = []

    def mark(what: str, flags: dict[int, int]) -> int:
        asked.append((what, dict(flags)))
        return 50

    hands = Handshake(driver, 0, [1000, 2000], mark)
    assert asked == [("full", {1: 1004}), ("empty", {1: 1012})]
    assert hands.await_posts == [Write(50, 1), Wait(1004, 1), Write(50, 0), Write(1004, 0)]


def test_an_arena_of_one_rank_is_ordinary_memory() -> None:
    arena = LocalArena(100, torch.device("cpu"))
    assert arena.local.numel() == aligned(100) == 256
    assert arena.local.count_nonzero() == 0
    assert list(arena.pointers) == [arena.local.data_ptr()]


def reason_on_the_cpu() -> str | None:
    group = subgroup((0, 1))
    return why_not(group, torch.device("cpu")) if group is not None and rank() < 2 else None


def test_the_cpu_has_no_peers(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(2).run(reason_on_the_cpu) == ["cpu has no copy engines to peers"] * 2


def test_a_driver_needs_libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtp.errors import GTPStateError

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(peer_driver.ctypes, "CDLL", missing)
    with pytest.raises(GTPStateError, match=r"libcuda\.so\.1 cannot be loaded"):
        peer_driver.CudaDriver(torch.device("cuda", 0))

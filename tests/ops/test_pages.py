"""Physical memory that is mapped at several places, and handed to other ranks."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gtp.errors import GTPStateError
from gtp.ops.peer import Block, CudaPages, Mapping, make_paged_arena
from gtp.ops.peer.watchdog import WATCHDOG_THREAD
from gtp.testing.host_pages import HostPages
from gtp.testing.ranks import RankPool, RankPools


def _pages(device: str) -> Any:
    return HostPages() if device == "cpu" else CudaPages(torch.device("cuda", torch.cuda.current_device()))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_one_block_is_seen_at_two_places(device: str) -> None:
    pages = _pages(device)
    shared, other = Block(pages, pages.page), Block(pages, 2 * pages.page)
    alone, between = (
        Mapping(pages, [shared]).tensor(),
        Mapping(pages, [other, shared, Block(pages, pages.page)]).tensor(),
    )
    assert between.numel() == 4 * pages.page
    assert between.device.type == device
    between.copy_(torch.randint(0, 255, between.shape, dtype=torch.uint8, device=device))
    mine = between[2 * pages.page : 3 * pages.page]
    assert torch.equal(alone, mine)
    before = between.clone()
    alone.add_(1)
    assert torch.equal(mine, alone)
    assert torch.equal(between[: 2 * pages.page], before[: 2 * pages.page])
    assert torch.equal(between[3 * pages.page :], before[3 * pages.page :])


def test_memory_goes_with_the_last_tensor_over_it() -> None:
    pages = HostPages()
    block = Block(pages, pages.page)
    first, second = Mapping(pages, [block]).tensor(), Mapping(pages, [block]).tensor()
    assert (pages.mapped, pages.allocated) == (2 * pages.page, pages.page)
    part = first[:3].view(torch.uint8)
    del first
    assert pages.mapped == 2 * pages.page
    part.fill_(7)
    assert second[:4].tolist() == [7, 7, 7, 0]
    del part
    assert pages.mapped == pages.page
    del second, block
    assert (pages.mapped, pages.allocated) == (0, 0)


@pytest.mark.gpu
def test_memory_of_a_gpu_comes_back() -> None:
    pages = _pages("cuda")
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    size = 64 * pages.page
    tensor = Mapping(pages, [Block(pages, size), Block(pages, size)]).tensor()
    tensor.fill_(1)
    held, _ = torch.cuda.mem_get_info()
    assert before - held > 1.5 * size  # another process on the GPU may have given something back
    del tensor
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= before - pages.page


@pytest.mark.gpu
def test_memory_that_goes_where_nobody_may_wait_comes_back_later() -> None:
    """In a capture, which stays whole; and in the watchdog's thread, which others may be waiting for."""
    pages = _pages("cuda")
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    size = 64 * pages.page
    tensors = [Mapping(pages, [Block(pages, size)]).tensor().fill_(1) for _ in range(3)]
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        tensors.pop()
        y += 1
    watchdog = threading.Thread(target=tensors.pop, name=WATCHDOG_THREAD)
    watchdog.start()
    watchdog.join()
    assert before - torch.cuda.mem_get_info()[0] > 2.5 * size  # as above
    graph.replay()
    assert y.tolist() == [3.0] * 8
    tensors.pop()
    gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < size


class _Retiring(CudaPages):
    """As much of the real ones as the end of a mapping asks for."""

    def __init__(self) -> None:
        self._index, self._cuda = 0, mock.MagicMock()
        self.calls: list[str] = []

    def _call(self, name: str, *arguments: object) -> None:
        self.calls.append(name)


def test_what_cannot_be_unmapped_in_a_capture_is_when_the_collector_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of this thread's is asked about; another thread's shows when the device is waited for."""
    pages, unmapped = _Retiring(), ["cuMemUnmap", "cuMemAddressFree"]
    captures, trouble = [True], ["operation not permitted when stream is capturing"]

    def synchronize(device: int) -> None:
        if trouble:
            raise RuntimeError(trouble[0])

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    pages.retire(1 << 40, 4096, 4096)
    captures[0] = False
    gc.collect()
    assert pages.calls == []
    trouble.clear()
    gc.collect()
    assert pages.calls == unmapped
    pages.retire(1 << 40, 4096, 4096)
    assert pages.calls == 2 * unmapped


def test_memory_of_a_device_that_has_failed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the collector does not come back to it for ever: a loop over `gc.collect()` ends."""
    pages = _Retiring()

    def fails(*_: object) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    for name in ("is_current_stream_capturing", "synchronize"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            patch.setattr(torch.cuda, name, fails)
            gc.collect()
            pages.retire(1 << 40, 4096, 4096)
            assert gc.collect() == 0
    assert pages.calls == []


def test_a_mapping_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = HostPages()
    blocks = [Block(pages, pages.page), Block(pages, pages.page)]
    once, real = [True], pages.map

    def fails_the_second_time(*arguments: int) -> None:
        if not once:
            raise GTPStateError("no")
        once.clear()
        real(*arguments)

    monkeypatch.setattr(pages, "map", fails_the_second_time)
    with pytest.raises(GTPStateError, match="no"):
        Mapping(pages, blocks)
    assert pages.mapped == 0


def _exchange(device: str, sizes: list[int]) -> None:
    """Every rank reads what the others wrote, where they wrote it, and sees it change."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    pages = _pages(device)
    arena, problem = make_paged_arena([n * pages.page for n in sizes], dist.group.WORLD, pages)
    assert problem is None
    assert [block.nbytes for block in arena.blocks] == [n * pages.page for n in sizes]
    starts = [sum(sizes[:index]) * pages.page for index in range(len(sizes))]
    for turn in range(2):
        for index, start in enumerate(starts):
            arena.local[start : start + 4] = torch.tensor([rank, index, turn, 9], dtype=torch.uint8)
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        for peer in range(world):
            mapping = arena._peers.get(peer)
            seen = arena.local if mapping is None else mapping.tensor()
            assert seen.data_ptr() == arena.pointers[peer]
            for index, start in enumerate(starts):
                assert seen[start : start + 4].tolist() == [peer, index, turn, 9]
        dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_see_each_others_blocks(ranks: RankPools, world: int) -> None:
    ranks(world).run(_exchange, "cpu", [1, 3, 2] * 13)  # more than go over the socket at a time


@pytest.mark.gpu
def test_ranks_see_each_others_blocks_on_gpus(pair: RankPool) -> None:
    pair.run(_exchange, "cuda", [1, 3, 2] * 13)


def _exchange_with_trouble(rank_in_trouble: int, where: str, error: type[Exception]) -> None:
    rank = dist.get_rank()
    pages = HostPages()
    if rank == rank_in_trouble:

        def fails(*_: Any, **__: Any) -> int:
            raise error("it cannot be done")

        setattr(pages, where, fails)
    files = len(os.listdir("/proc/self/fd"))
    arena, problem = make_paged_arena([pages.page] * 3, dist.group.WORLD, pages)
    assert arena is None
    assert f"rank {rank_in_trouble} of group" in problem
    assert "it cannot be done" in problem
    assert pages.mapped == 0
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    "where, error",
    [
        ("create", torch.OutOfMemoryError),
        ("map", GTPStateError),
        ("export", OSError),
        ("import_", MemoryError),
        ("reserve", RuntimeError),
    ],
)
def test_a_rank_that_cannot_is_named_on_all_ranks(ranks: RankPools, where: str, error: type[Exception]) -> None:
    """Whatever it is that went wrong there: the others would wait for a rank that raises alone."""
    ranks(2).run(_exchange_with_trouble, 1, where, error)


def _exchange_of_other_sizes() -> None:
    pages = HostPages()
    sizes = [pages.page] * (64 if dist.get_rank() == 0 else 128)
    arena, problem = make_paged_arena(sizes, dist.group.WORLD, pages)
    assert arena is None
    assert "want blocks of different sizes" in problem
    assert (pages.mapped, pages.allocated) == (0, 0)


def test_ranks_that_want_different_blocks_all_hear_of_it(ranks: RankPools) -> None:
    ranks(2).run(_exchange_of_other_sizes)


def _descriptors_on_their_way(limit: int) -> None:
    send, receive = socket.send_fds, socket.recv_fds
    sent, most = 0, 0

    def counting_send(connection: socket.socket, buffers: Any, descriptors: list[int]) -> int:
        nonlocal sent, most
        sent += len(descriptors)
        most = max(most, sent)
        return send(connection, buffers, descriptors)

    def counting_receive(connection: socket.socket, size: int, descriptors: int) -> Any:
        nonlocal sent
        sent = 0  # all ranks take theirs after all have sent
        return receive(connection, size, descriptors)

    pages = HostPages()
    with mock.patch.object(socket, "send_fds", counting_send), mock.patch.object(socket, "recv_fds", counting_receive):
        arena, problem = make_paged_arena([pages.page] * 70, dist.group.WORLD, pages)
    assert problem is None
    assert len(arena.blocks) == 70
    assert 0 < most <= limit


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_one_user_have_few_descriptors_on_their_way(ranks: RankPools, world: int) -> None:
    """The kernel refuses more than the limit on open files, often 1024, for all processes of a user together."""
    ranks(world).run(_descriptors_on_their_way, 1024 // 8 // 2)


class _Driver:
    """As much of libcuda as mapping asks for; memory cannot be made accessible."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        return 0

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        size._obj.value = 1 << 21
        return 0

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        handle._obj.value = 1
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> int:
        address._obj.value = 1 << 40
        self.reserved[1 << 40] = size.value
        return 0

    def cuMemMap(self, address: Any, size: Any, *_: Any) -> int:
        self.mapped[address.value] = size.value
        return 0

    def cuMemSetAccess(self, *_: Any) -> int:
        return 101

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        return 0 if self.mapped.pop(address.value, None) == size.value else 1

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        return 1 if self.mapped else self.reserved.pop(address.value) != size.value


def test_memory_that_a_gpu_cannot_see_is_not_left_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pages = CudaPages(torch.device("cuda", 0))
    with pytest.raises(GTPStateError, match="cuMemSetAccess failed with CUDA driver error 101"):
        Mapping(pages, [Block(pages, pages.page)])
    assert (driver.mapped, driver.reserved) == ({}, {})

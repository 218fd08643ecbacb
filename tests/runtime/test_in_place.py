"""Gathered weights around this rank's own shards, mapped into them: layout, leases, and who is told of writes."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from gtp.ops.peer import Block, Mapping
from gtp.runtime.buffers import BufferPool, nbytes_of
from gtp.runtime.copy_engine import CopyEngineTransport
from gtp.runtime.group import WeightGroup
from gtp.runtime.in_place import Place, Room, whole_pages
from gtp.runtime.residency import Gatherer
from gtp.runtime.schedule import Phase, Schedule
from gtp.testing.host_pages import HostPages
from tests.runtime.simulated_streams import Machine
from tests.runtime.test_copy_engine_protocol import Rank, make_ranks


def _room(pages: HostPages | None = None) -> Room:
    return Room(HostPages() if pages is None else pages, lambda: 0)


def _pool(limit: int = 1 << 30) -> BufferPool:
    return BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), limit=limit, on_cuda=False)


def _shards(room: Room, pages: Sequence[int]) -> list[tuple[Block, int]]:
    return [(Block(room.pages, n * room.pages.page), n * room.pages.page) for n in pages]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("members", [[4096], [8192, 4096, 12288], [3840], [7936, 4096, 11776]])
def test_every_rank_finds_its_own_shards_where_they_belong(size: int, members: list[int]) -> None:
    """Also those that end within a page, which the next rank's shard shares with them."""
    for rank in range(size):
        room = _room()
        page = room.pages.page
        own = [(Block(room.pages, whole_pages(nbytes, page)), nbytes) for nbytes in members]
        place = Place(room, own, rank, size)
        total = (size - 1) * sum(members)
        assert total <= sum(place.kind) + sum(block.nbytes - nbytes for block, nbytes in own)
        assert sum(place.kind) <= total + 2 * page * len(members)
        buffer = _pool().lease(place)
        shapes = [(size * nbytes,) for nbytes in members]
        full = buffer.views("weights", shapes, torch.uint8)
        for number, each in enumerate(full):
            each.copy_(torch.arange(size).repeat_interleave(members[number]) + 10 * number)
        for number, (block, nbytes) in enumerate(own):
            shard = Mapping(room.pages, [block]).tensor()[:nbytes]
            assert shard.tolist() == [rank + 10 * number] * nbytes
            assert full[number].tolist() == [r + 10 * number for r in range(size) for _ in range(nbytes)]
            assert full[number].data_ptr() % 256 == 0


def test_groups_of_one_kind_share_memory_and_each_has_its_own_shard() -> None:
    room = _room()
    page, own = room.pages.page, _shards(room, [1, 1, 2])
    first, second, other = [Place(room, [block], 0, 2) for block in own]
    pool = _pool()
    buffer = pool.lease(first)
    buffer.views(0, [(2, page)], torch.uint8)[0][0] = 1
    pool.let_go(buffer)
    assert pool.lease(second) is buffer
    (full,) = buffer.views(1, [(2, page)], torch.uint8)
    full[0] = 2
    full[1] = 3
    pool.let_go(buffer)
    wide = pool.lease(other)
    assert wide is not buffer
    assert pool.lease(first) is buffer
    (again,) = buffer.views(0, [(2, page)], torch.uint8)
    assert again[0].unique().tolist() == [1]
    assert again[1].unique().tolist() == [3]  # a peer's part: what the last holder left there
    assert room.nbytes == 3 * page


def test_memory_that_is_still_looked_at_is_not_leased_again() -> None:
    room = _room()
    (block,) = _shards(room, [1])
    place, pool = Place(room, [block], 1, 2), _pool()
    held = []
    for number in range(3):
        buffer = pool.lease(place)
        (full,) = buffer.views(0, [(2 * room.pages.page,)], torch.uint8)
        handed = full.detach()
        pool.hand_out(buffer, handed)
        pool.let_go(buffer)
        held.append(handed[:4])  # a view, as autograd saves one
        held[-1].fill_(number)
        del handed, full
    assert [view.unique().tolist() for view in held] == [[0], [1], [2]]
    assert pool.leased_bytes == 3 * room.pages.page
    held.clear()
    pool.lease(place)
    assert pool.reserved_bytes == 3 * room.pages.page


def _saved_for_backward(pool: BufferPool, place: Place, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of somebody's product with a full weight, which backward reads; and its input."""
    buffer = pool.lease(place)
    (full,) = buffer.views(place, [(rows, 32)], torch.float32)
    handed = full.detach()
    pool.hand_out(buffer, handed)
    pool.let_go(buffer)
    x = torch.ones(3, 32, requires_grad=True)
    return torch.nn.functional.linear(x, handed), x


def test_backward_refuses_a_full_weight_whose_shard_was_written() -> None:
    """As it does for a plain weight. With a copy it would have computed with what forward had."""
    room = _room()
    rows = 2 * room.pages.page // 128
    written, untouched = [Place(room, [block], 0, 2) for block in _shards(room, [1, 1])]
    pool = _pool()
    (y, _), (z, x) = [_saved_for_backward(pool, place, rows) for place in (written, untouched)]
    pool.shard_written(written)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    z.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (3, 32)


def test_a_lease_that_ends_meanwhile_does_not_disturb_a_write() -> None:
    """The garbage collector runs when it likes, and ends leases."""
    room, pool = _room(), _pool()
    places = [Place(room, [block], 0, 2) for block in _shards(room, [1, 1])]
    threshold = gc.get_threshold()
    left = []
    for allocations in range(1, 16):
        gc.collect()
        gc.disable()
        try:
            for place in places * 2:
                _leave_in_a_cycle(pool, place)
            gc.set_threshold(gc.get_count()[0] + allocations, *threshold[1:])
            gc.enable()
            pool.shard_written(places[0])
        finally:
            gc.set_threshold(*threshold)
            gc.enable()
        gc.collect()
        held = pool.lease(places[0])  # looks at what lingers
        left.append(pool.leased_bytes)
        pool.let_go(held)
    assert left == [room.pages.page] * 15


def _leave_in_a_cycle(pool: BufferPool, place: Place) -> None:
    buffer = pool.lease(place)
    (full,) = buffer.views(place, [(2 * place.kind[0],)], torch.uint8)
    handed = full.detach()
    pool.hand_out(buffer, handed)
    pool.let_go(buffer)
    garbage: list[object] = [handed]
    garbage.append(garbage)


@pytest.mark.parametrize("captured", [0, 1], ids=["eager", "captured"])
def test_a_transport_that_goes_takes_its_memory_along_at_once(captured: int) -> None:
    """Shards and gathered weights of a deleted model do not wait for the garbage collector."""
    pages = HostPages()
    room = Room(pages, lambda: captured)
    (own,) = _shards(room, [1])
    place, pool = Place(room, [own], 0, 2), _pool()
    buffer = pool.lease(place)
    buffer.views(place, [(2 * pages.page,)], torch.uint8)
    pool.let_go(buffer)
    assert (pages.mapped, pages.allocated) == (2 * pages.page, 2 * pages.page)
    gc.disable()
    try:
        if captured:
            pool.end()
        del room, own, place, pool, buffer
        assert (pages.mapped, pages.allocated) == (0, 0)
    finally:
        gc.enable()


def test_a_pool_that_may_keep_little_gives_mapped_memory_back() -> None:
    pages = HostPages()
    room, pool = _room(pages), _pool(limit=4 * pages.page)
    blocks = _shards(room, [1, 2, 3])
    places = [Place(room, [block], 0, 2) for block in blocks]
    for place in places:
        buffer = pool.lease(place)
        buffer.views(place, [(2 * sum(place.kind),)], torch.uint8)
        pool.let_go(buffer)
    del buffer
    assert pool.reserved_bytes == room.nbytes <= 4 * pages.page
    pool.trim()
    assert (room.nbytes, pages.mapped) == (0, 0)
    assert pages.allocated == 6 * pages.page  # the shards


def test_memory_that_cannot_be_mapped_stays_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    room, pool = _room(), _pool()
    (block,) = _shards(room, [1])
    place = Place(room, [block], 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(room.pages, "reserve", lambda nbytes: (_ for _ in ()).throw(MemoryError("no addresses")))
        with pytest.raises(MemoryError, match="no addresses"):
            pool.lease(place)
    assert pool.leased_bytes == 0
    buffer = pool.lease(place)
    assert pool.reserved_bytes == buffer.nbytes == room.pages.page


def _copied(me: Rank, index: int) -> int:
    """Bytes that a gather of a group queues copies of."""
    group, place = me.groups[index], me.transport.place(me.groups[index])
    shapes = [m.padded_shape(group.size) for m in group.members]
    buffer = _pool().lease(nbytes_of(shapes, torch.float32) if place is None else place)
    me.transport.open(me.groups)
    before = {id(op) for queue in me.driver.machine.queues.values() for op in queue}
    ticket = me.transport.start_gather(group, buffer.views(index, shapes, torch.float32), [])
    me.transport.finish_gather(ticket)
    queued = [op for queue in me.driver.machine.queues.values() for op in queue if id(op) not in before]
    return sum(int(op.what.split()[1]) for op in queued if op.what.startswith("copy"))


def test_what_is_in_place_is_not_copied() -> None:
    shapes = [[(16, 64), (31, 64)], [(16, 60)], [(16, 61)], [(12, 64)]]
    placed = [True, True, False, False]  # the last two: no multiple of 256 bytes; a third more would lie waste
    for index, in_place in enumerate(placed):
        me = make_ranks(Machine(4), [(0, 1, 2, 3)] * 4, shapes)[1]
        assert (me.transport.place(me.groups[index]) is not None) == in_place
        nbytes = sum(member.send.nbytes for member in me.groups[index].members)
        assert _copied(me, index) == (3 if in_place else 4) * nbytes


def test_weights_that_users_see_are_copies() -> None:
    machine = Machine(2)
    for me in make_ranks(machine, [(0, 1)] * 2, [[(16, 64)]] * 2, shown=[0]):
        assert me.transport.place(me.groups[0]) is None
        assert me.transport.place(me.groups[1]) is not None


def test_compute_copies_of_written_shards_are_current_before_peers_read_them() -> None:
    """Also where the first gather after a write is that of a submodule called by hand, in the middle of a line."""
    me = make_ranks(Machine(2), [(0, 1)] * 2, [[(16, 64)]] * 2)[0]
    for group in me.groups:
        group.members[0].shard = group.members[0].shard.clone()  # `send` is a compute copy of it
    told: list[object] = []
    open_, before = me.transport.open, lambda group: bool(told.append(group.index))

    def open_and_look(groups: Sequence[WeightGroup]) -> None:
        told.append([(group.members[0].send - group.members[0].shard).abs().max().item() for group in groups])
        open_(groups)

    me.transport.open = open_and_look  # type: ignore[method-assign]
    sizes = [group.gathered_nbytes for group in me.groups]
    schedule = Schedule(sizes, prefetch_bytes=0, keep_bytes=0)
    gatherer = Gatherer(me.groups, schedule, _pool(), me.transport, before)
    first, second = me.groups
    gatherer.consume(first, Phase.FORWARD, inside=False)
    assert told[:2] == [0, [0.0]]  # shards are current, then peers are told
    gatherer.open_line()
    gatherer.consume(first, Phase.FORWARD, inside=True)
    gatherer.before_write([second])
    second.members[0].shard.add_(1)
    told.clear()
    gatherer.consume(first, Phase.FORWARD, inside=False)
    assert told[:3] == [0, 1, [0.0, 0.0]]
    gatherer.close_line()


def test_mapping_can_be_turned_off() -> None:
    machine = Machine(2)
    me, _ = make_ranks(machine, [(0, 1)], [[(16, 64)]])
    pages = (machine.pages, machine.paged_arena)
    transport = CopyEngineTransport(
        torch.device("cpu"), map_shards=False, driver=me.driver, make_arena=me.driver.make_arena, pages=pages
    )
    assert transport._pages is None
    assert me.transport._pages == pages

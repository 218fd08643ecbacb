"""Gathered weights in which this rank's own shards are not copies but the shards themselves, mapped a second time.

A gathered weight is N shards at consecutive addresses. Copying this rank's own from one place of its memory to another
costs no link and yet holds up the GEMMs beside it: a large copy within a GPU is a kernel that fills it. So shards of
nearly whole pages are mapped to where they belong, and what is leased is the memory between them, for peers' shards.

[Note: the last page] Memory is mapped in pages. A weight is laid so that this rank's shard begins one. Where it does
not end with one, what follows in its last page belongs to the next rank's shard, and lies in memory that all buffers
of this weight have in common. They may: between two writes of the shards every gather brings the same bytes there.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from gtp.ops.peer import Block, Mapping, Pages
from gtp.runtime.buffers import Buffer, Kind


class Place:
    """How buffers of one weight group are made, and mapped.

    Args:
        room: Where buffers come from.
        own: This rank's shards, each at the beginning of a block of its own, and their bytes.
        rank, size: Of the group.

    Attributes:
        kind: Bytes of the stretches around this rank's shards, in order of address. Groups of one kind share buffers.
        starts: Where each weight begins, in bytes from the beginning of a buffer.
    """

    def __init__(self, room: Room, own: Sequence[tuple[Block, int]], rank: int, size: int) -> None:
        self._room = weakref.ref(room)  # which may hold buffers, which hold this
        self._pages = room.pages
        self._order: list[Block | None] = []  # None stands for the next piece
        pieces: list[int] = []
        starts: list[int] = []
        page, at, between = room.pages.page, 0, 0

        def add_piece() -> None:
            if between:
                pieces.append(between)
                self._order.append(None)

        for block, nbytes in own:
            before = whole_pages(rank * nbytes, page)
            starts.append(at + before - rank * nbytes)
            between += before
            add_piece()
            self._order.append(block)
            # see [Note: the last page]
            between = whole_pages(max((size - rank) * nbytes - block.nbytes, 0), page)
            at += before + block.nbytes + between
        add_piece()
        self.kind = tuple(pieces)
        self.starts = tuple(starts)

    def new_buffer(self, home: torch.cuda.Stream | None) -> MappedBuffer:
        """A buffer for peers' shards, for this group or another one of its kind."""
        room = self._room()
        assert room is not None  # transports hold theirs
        return room.take(self.kind, home)

    def map(self, pieces: Sequence[Block]) -> torch.Tensor:
        """uint8 over a whole gathered group: peers' shards in `pieces`, this rank's own where they are."""
        left = iter(pieces)
        return Mapping(self._pages, [next(left) if block is None else block for block in self._order]).tensor()


def whole_pages(nbytes: int, page: int) -> int:
    """`nbytes` rounded up."""
    return -(-nbytes // page) * page


class MappedBuffer(Buffer):
    """A `Buffer` that is mapped anew for each group that leases it, once."""

    __slots__ = ("__weakref__", "_mapped", "_pieces", "_place", "_room")

    def __init__(self, pieces: Sequence[Block], home: torch.cuda.Stream | None, room: Room | None) -> None:
        super().__init__(torch.empty(0, dtype=torch.uint8), home)
        self.kind = tuple(piece.nbytes for piece in pieces)
        self.nbytes = sum(self.kind)
        self.lasting = room is not None  # see [Note: what graphs hold]
        self._pieces = pieces
        self._mapped: dict[Place, torch.Tensor] = {}
        self._place: Place | None = None
        self._room = None if room is None else weakref.ref(room)  # which holds this buffer, of a capture

    def enter(self, place: Place) -> None:
        """The next views are those of this group. Nobody reads through those of another one any more."""
        base = self._mapped.get(place)
        if base is None:
            base = self._mapped[place] = place.map(self._pieces)
        self._look_at(base)
        self._place = place

    def shard_written(self, place: Place) -> None:
        # autograd refuses what was saved and has another version since, as it does for a plain weight
        if self._place is place:
            torch.autograd.graph.increment_version(self._base)

    def _starts(self, sizes: Sequence[int]) -> Sequence[int]:
        assert self._place is not None  # views are asked for after `enter`
        return self._place.starts

    def capture_ended(self) -> None:
        room = None if self._room is None else self._room()
        if room is not None:
            room.spare(self)


class Room:
    """The memory of all mapped buffers of one transport.

    [Note: what graphs hold] A graph knows the addresses that it was captured with, and nothing tells when it goes. So a
    buffer of a capture lives as long as the transport. The next capture may have those that were free when the one
    before it ended, as graphs of one runtime are replayed one after the other.

    Args:
        pages: This rank's.
        capture: Tells whether a graph is being captured.
    """

    def __init__(self, pages: Pages, capture: Callable[[], int]) -> None:
        self.pages = pages
        self._capture = capture
        self._buffers: weakref.WeakSet[MappedBuffer] = weakref.WeakSet()
        self._of_captures: list[MappedBuffer] = []
        self._spare: defaultdict[Kind, list[MappedBuffer]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces that exist."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, kind: tuple[int, ...], home: torch.cuda.Stream | None) -> MappedBuffer:
        """A buffer with pieces of these bytes."""
        captured = bool(self._capture())
        if captured and (spare := self._spare[kind]):
            buffer = spare.pop()
            buffer.home = home
            return buffer
        buffer = MappedBuffer([Block(self.pages, nbytes) for nbytes in kind], home, self if captured else None)
        self._buffers.add(buffer)
        if captured:
            self._of_captures.append(buffer)
        return buffer

    def spare(self, buffer: MappedBuffer) -> None:
        """A buffer of a capture is free for the next one."""
        self._spare[buffer.kind].append(buffer)

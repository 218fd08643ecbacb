"""`Workspace`: the peer memory of `CopyEngineBackend`. Two slots that take turns, each with flags for every peer.

A slot holds one block of rows per rank: gathered rows, or the products that peers sent for this rank's rows. While one
slot is read, peers may already fill the other. Flags are those of [Note: signals that replay]: a sender fills its block
in a peer's slot only after that peer has released it, so nothing is ever overwritten before it was read, and a graph's
replays need no counters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from gtp.ops.peer import WORD, ArenaFactory, Driver, Handshake, Watch, aligned

SLOTS = 2
_MOST_VIEWS = 256

_ABSENT: Final = {"full": "to send its part of a collective GEMM", "empty": "to take what was sent to it for one"}


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One of the two halves of the workspace.

    Attributes:
        local: This rank's memory, uint8 `[capacity]`.
        pointers: Per rank, the address of this slot in its memory as mapped here.
        reclaim: Per peer, a batch that waits until the peer has released this rank's block over there.
        post: Per peer, a batch that tells the peer that its block from this rank is there.
        arrived: Per peer, a batch that waits for its block.
        release: A batch that tells all peers that their blocks were read.
    """

    local: torch.Tensor
    pointers: tuple[int, ...]
    reclaim: dict[int, Any]
    post: dict[int, Any]
    arrived: dict[int, Any]
    release: Any
    _views: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = dataclasses.field(default_factory=dict)

    def blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The blocks of all ranks as one tensor `[ranks, *block]`."""
        view = self._views.get((shape, dtype))
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()  # sizes that never come back
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            view = self._views[shape, dtype] = self.local[:nbytes].view(dtype).view(shape)
        return view


class Workspace:
    """Peer memory of one size. Making one is collective.

    Args:
        driver: Prepares signals.
        process_group: The group.
        capacity: Bytes of a slot.
        make_arena: Allocates.
        watch: Told of every wait. None where nobody watches.
    """

    def __init__(
        self,
        driver: Driver,
        process_group: dist.ProcessGroup,
        capacity: int,
        make_arena: ArenaFactory,
        watch: Watch | None = None,
    ) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.capacity = aligned(capacity)
        self.captured = False  # whether some CUDA graph has its addresses
        self._turn = 0
        words = Handshake.words_needed(self.size)
        flags = aligned(SLOTS * words * WORD)
        self.arena = make_arena(flags + SLOTS * self.capacity, process_group)
        self._flags = self.arena.local[: SLOTS * words * WORD].view(torch.int32)
        # every block is free: the `empty` words, which follow the `full` ones, start at 1
        self._flags.view(SLOTS, 2, self.size)[:, 1].fill_(1)
        self._watch = watch
        self._slots = tuple(self._slot(driver, index, flags + index * self.capacity) for index in range(SLOTS))

    def next_slot(self) -> Slot:
        """In turns, which all ranks take alike, because they run the same operations."""
        self._turn += 1
        return self._slots[self._turn % SLOTS]

    def flags(self) -> torch.Tensor:
        """This rank's flag words, int32."""
        return self._flags

    def _mark(self, what: str, flags: Mapping[int, int]) -> int:
        assert self._watch is not None
        base = self.arena.pointers[self.rank]
        return self._watch(self, _ABSENT[what], {peer: (at - base) // WORD for peer, at in flags.items()})

    def _slot(self, driver: Driver, index: int, offset: int) -> Slot:
        words = Handshake.words_needed(self.size) * WORD
        hands = Handshake(
            driver,
            self.rank,
            [p + index * words for p in self.arena.pointers],
            None if self._watch is None else self._mark,
        )
        return Slot(
            local=self.arena.local[offset : offset + self.capacity],
            pointers=tuple(p + offset for p in self.arena.pointers),
            reclaim={p: driver.batch(hands.reclaim_ops([p])) for p in hands.peers},
            post={p: driver.batch(hands.post_ops([p])) for p in hands.peers},
            arrived={p: driver.batch(hands.await_ops([p])) for p in hands.peers},
            release=driver.batch(hands.release_ops(hands.peers)),
        )

"""`Workspace`: the peer memory of `CopyEngineBackend`. Two slots that take turns, each with flags for every peer.

A slot holds one block of rows per rank: gathered rows, or the products that peers sent for this rank's rows. While one
slot is read, peers may already fill the other. Flags are those of [Note: signals that replay]: a sender fills its block
in a peer's slot only after that peer has released it, so nothing is ever overwritten before it was read, and a graph's
replays need no counters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from gtp.ops.peer import WORD, ArenaFactory, Driver, Handshake, Watch, aligned

SLOTS = 2
_MOST_VIEWS = 256

_ABSENT: Final = {"full": "to send its part of a collective GEMM", "empty": "to take what was sent to it for one"}


class Blocks:
    """The blocks of all ranks in a slot, as tensors. Made once per size: each costs the host as much as a driver call.

    Attributes:
        stacked: `[ranks, rows, columns]`.
        each: Per rank, `[rows, columns]`.
    """

    def __init__(self, stacked: torch.Tensor) -> None:
        self.stacked = stacked
        self.each = tuple(stacked[rank] for rank in range(stacked.shape[0]))

    @functools.cached_property
    def joined(self) -> torch.Tensor:
        """`[ranks * rows, columns]`, to be read. Not of transposes."""
        return self.stacked.view(-1, self.stacked.shape[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One of the two halves of the workspace.

    A step is one block to the peer that many ranks above, and one from as many below.

    Attributes:
        local: This rank's memory, uint8 `[capacity]`.
        pointers: Per rank, the address of this slot in its memory as mapped here.
        reclaim: By step, a batch that waits until the peer has released this rank's block over there. None for step 0.
        posts: By step, the batches to be submitted when the block is over there, and what they wait for last: the step
            whose block has come then, or None. The first one tells the peer. For the order of waits see
            [Note: no deadlock between branches]; a post and a wait that follows it are one batch.
        reclaim_all: A batch with the waits of all of `reclaim`.
        exchange: A batch that tells all peers that their blocks are there, and then waits for theirs.
        release: A batch that tells all peers that their blocks were read.
    """

    local: torch.Tensor
    pointers: tuple[int, ...]
    reclaim: tuple[Any, ...]
    posts: tuple[tuple[tuple[Any, int | None], ...], ...]
    reclaim_all: Any
    exchange: Any
    release: Any
    _views: dict[tuple[int, int, torch.dtype, bool], Blocks] = dataclasses.field(default_factory=dict)

    def blocks(self, rows: int, columns: int, dtype: torch.dtype, *, transposed: bool = False) -> Blocks:
        """All ranks' blocks `[rows, columns]`; `transposed`: each lies there as `[columns, rows]`."""
        key = (rows, columns, dtype, transposed)
        found = self._views.get(key)
        if found is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()  # sizes that never come back
            ranks = len(self.pointers)
            with torch.inference_mode(False):  # or training could not write them
                memory = self.local[: ranks * rows * columns * dtype.itemsize].view(dtype)
                if transposed:
                    stacked = memory.view(ranks, columns, rows).transpose(1, 2)
                else:
                    stacked = memory.view(ranks, rows, columns)
                found = self._views[key] = Blocks(stacked)
        return found


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
            reclaim=(None, *(driver.batch(hands.reclaim_ops([p])) for p in hands.peers)),
            posts=((), *(self._posts(driver, hands, step) for step in range(1, self.size))),
            reclaim_all=hands.reclaim,
            exchange=driver.batch(hands.post_ops(hands.peers) + hands.await_ops(hands.peers)),
            release=hands.release,
        )

    def _posts(self, driver: Driver, hands: Handshake, step: int) -> tuple[tuple[Any, int | None], ...]:
        """See `Slot.posts`."""
        post = hands.post_ops([(self.rank + step) % self.size])
        waits = [step - 1] if step > 1 else []
        if step == self.size - 1:
            waits.append(step)
        if not waits:
            return ((driver.batch(post), None),)
        batches = [hands.await_ops([(self.rank - waited) % self.size]) for waited in waits]
        batches[0] = post + batches[0]
        return tuple((driver.batch(ops), waited) for ops, waited in zip(batches, waits, strict=True))

"""`Domain`: the peer memory of one process group. Where shards, flags and mailboxes lie, on every rank alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.ops.peer import (
    WORD,
    Arena,
    ArenaFactory,
    Block,
    Driver,
    Handshake,
    PagedArena,
    PagedArenaFactory,
    Pages,
    Watch,
    aligned,
)
from gtp.runtime.group import Member, WeightGroup
from gtp.runtime.in_place import whole_pages


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """The part of a mailbox's traffic that one stream carries."""

    stream: int
    peers: tuple[int, ...]
    reclaim: Any  # signal batches over these peers
    post: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Mailbox:
    """Room at every rank for one contribution from each of the others.

    Attributes:
        hands: Its flags.
        inbox: Address of this rank's own room; sender after sender, `stride` bytes apart, this rank left out.
        stride: Bytes for one contribution, a multiple of 256.
        outbox: Per rank, the address in its memory where this rank's contribution goes; 0 for this rank.
        lanes: Who sends what.
        index: Position in the domain.
    """

    hands: Handshake
    inbox: int
    stride: int
    outbox: tuple[int, ...]
    lanes: tuple[Lane, ...]
    index: int


class Domain:
    """Shards, flags and mailboxes of one process group.

    Args:
        driver: Prepares signals.
        process_group: The group.
        groups: The weight groups over it, in order of index.
        make_arena: Allocates. Called once, collectively.
        mailbox_bytes: Upper bound on one mailbox; the widest message of the groups may need less.
        mailboxes: How many take turns, in eager code and in graphs each: one is filled while another is read.
        send_streams: Streams that carry contributions; peers are dealt over them.
        watch: Told of every wait. None where nobody watches.
        pages: Where shards may be mapped a second time, and how blocks for them are made on all ranks; None where they
            may not.
    """

    def __init__(
        self,
        driver: Driver,
        process_group: dist.ProcessGroup,
        groups: Sequence[WeightGroup],
        make_arena: ArenaFactory,
        *,
        mailbox_bytes: int,
        mailboxes: int,
        send_streams: Sequence[int],
        watch: Watch | None,
        pages: tuple[Pages, PagedArenaFactory] | None = None,
    ) -> None:
        self.process_group = process_group
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.groups = groups
        self._driver = driver
        mailboxes *= 2
        words = Handshake.words_needed(self.size)
        self.flag_words = (2 + mailboxes) * words if self.size > 1 else 0
        stride = self._stride(groups, mailbox_bytes)
        at = aligned(self.flag_words * WORD)
        inboxes = [at + index * stride * (self.size - 1) for index in range(mailboxes if self.size > 1 else 0)]
        at += len(inboxes) * stride * (self.size - 1)
        self.offsets: dict[Member, int] = {}
        self.blocks: dict[Member, Block] = {}  # of the members that lie in pages of their own
        self.pages: PagedArena | None = None
        self.why_no_pages: str | None = None
        in_pages: dict[Member, int] = {}
        if pages is not None and self.size > 1:
            in_pages = _in_pages(groups, pages[0].page)
        if in_pages and pages is not None:
            self.pages, self.why_no_pages = pages[1]([*in_pages.values()], process_group, pages[0])
        if self.pages is not None:
            self.blocks = dict(zip(in_pages, self.pages.blocks, strict=True))
        in_block = 0
        for member in (m for group in groups for m in group.members):
            if member in self.blocks:
                self.offsets[member] = in_block
                in_block += in_pages[member]
            else:
                self.offsets[member] = at
                at += aligned(_nbytes(member))
        self.nbytes = at + in_block
        self.arena = make_arena(at, process_group)
        self.opened_with: Handshake | None = None
        self._turns = [0, 0]
        self.mailboxes: list[Mailbox] = []
        if self.size > 1:
            self._lines = tuple(
                self._handshake(index, watch, "to begin its forward", "to end its forward or backward")
                for index in range(2)
            )
            self._closing = [driver.batch([*h.release_ops(h.peers), *h.reclaim_ops(h.peers)]) for h in self._lines]
            self.mailboxes = [
                self._mailbox(index, inbox, stride, send_streams, watch) for index, inbox in enumerate(inboxes)
            ]

    def line(self, captured: bool) -> Handshake:
        """Flags of "published" and "finished reading".

        A graph that holds whole lines may be replayed while an eager line is open, so graphs have flags of their own.
        """
        return self._lines[captured]

    def closing(self, line: Handshake) -> Any:
        """Tells all peers that this rank has finished reading, and waits until they have."""
        return self._closing[self._lines.index(line)]

    def next_mailbox(self, captured: bool) -> Mailbox:
        """In turns, which all ranks take alike because they reduce in the same order.

        A graph of a part of a line may be replayed while eager reductions of that line are in flight, and nothing
        orders the two: they must not meet in a mailbox.
        """
        turn = self._turns[captured]
        self._turns[captured] = turn + 1
        return self.mailboxes[2 * (turn % (len(self.mailboxes) // 2)) + captured]

    def restart_turns(self) -> None:
        """At a line, so that eager lines and graphs of whole lines give the same mailboxes to the same reductions."""
        self._turns = [0, 0]

    def address(self, member: Member, rank: int) -> int:
        """Where `rank` publishes its shard of a member, as mapped here."""
        return self._arena_of(member).pointers[rank] + self.offsets[member]

    def shard_view(self, member: Member) -> torch.Tensor:
        """This rank's published shard `[shard_rows, *trailing]`, in the compute dtype."""
        start = self.offsets[member]
        local = self._arena_of(member).local
        return local[start : start + _nbytes(member)].view(member.send.dtype).view(member.send.shape)

    def _arena_of(self, member: Member) -> Arena:
        """Where its shards lie."""
        return self.pages if self.pages is not None and member in self.blocks else self.arena

    def flags(self) -> torch.Tensor:
        """This rank's flag words, int32."""
        return self.arena.local[: self.flag_words * WORD].view(torch.int32)

    def _stride(self, groups: Sequence[WeightGroup], mailbox_bytes: int) -> int:
        if self.size == 1:
            return 0
        widest = max((_nbytes(m) for g in groups for m in g.members), default=0)
        bound = mailbox_bytes // (self.size - 1)
        return max(min(aligned(widest), bound // 256 * 256), 4096)

    def _handshake(self, index: int, watch: Watch | None, full: str, empty: str) -> Handshake:
        first = index * Handshake.words_needed(self.size)
        words = [pointer + first * WORD for pointer in self.arena.pointers]
        base = self.arena.pointers[self.rank]

        if watch is None:
            return Handshake(self._driver, self.rank, words)

        def mark(what: str, flags: Mapping[int, int]) -> int:
            indices = {peer: (address - base) // WORD for peer, address in flags.items()}
            return watch(self, {"full": full, "empty": empty}[what], indices)

        return Handshake(self._driver, self.rank, words, mark)

    def _mailbox(
        self,
        index: int,
        inbox: int,
        stride: int,
        send_streams: Sequence[int],
        watch: Watch | None,
    ) -> Mailbox:
        hands = self._handshake(2 + index, watch, "to send its gradients", "to take gradients sent to it")
        first = (2 + index) * Handshake.words_needed(self.size)
        self.flags()[first + self.size : first + 2 * self.size] = 1  # all rooms are empty
        outbox = tuple(
            0 if peer == self.rank else self.arena.pointers[peer] + inbox + (self.rank - (self.rank > peer)) * stride
            for peer in range(self.size)
        )
        lanes = []
        for lane, stream in enumerate(send_streams):
            peers = hands.peers[lane :: len(send_streams)]
            if peers:
                reclaim, post = hands.reclaim_ops(peers), hands.post_ops(peers)
                lanes.append(Lane(stream, peers, self._driver.batch(reclaim), self._driver.batch(post)))
        return Mailbox(hands, self.arena.pointers[self.rank] + inbox, stride, outbox, tuple(lanes), index)


def _in_pages(groups: Sequence[WeightGroup], page: int) -> dict[Member, int]:
    """The members of groups all of whose shards are nearly whole pages, and the bytes of those.

    A full weight that others see stays a copy: they may keep it for later, and a copy is then what it was.
    """
    sizes = [[(m, _nbytes(m)) for m in group.members] for group in groups if not group.shown]
    fit = [group for group in sizes if all(_fills_pages(nbytes, page) for _, nbytes in group)]
    return {member: whole_pages(nbytes, page) for group in fit for member, nbytes in group}


def _fills_pages(nbytes: int, page: int) -> bool:
    """Whether pages are at most a quarter more, and a weight may begin a multiple of `nbytes` before one."""
    return nbytes > 0 and 4 * whole_pages(nbytes, page) <= 5 * nbytes and nbytes == aligned(nbytes)


def _nbytes(member: Member) -> int:
    return member.send.numel() * member.send.element_size()

"""What a gather copies from where, and how wgrads are cut into messages. Made once per group, used every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import torch

from gtp.runtime.domain import Domain
from gtp.runtime.group import WeightGroup

SPLIT_BYTES = 4 << 20  # a gather is worth more than one stream from here on

Copy = tuple[int, int, int, int]
"""Member, offset in its buffer, address at the peer, bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class GatherPlan:
    """Streams, and the copies that each of them carries."""

    domain: Domain
    lanes: tuple[tuple[int, tuple[Copy, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A range of one member's slice.

    Attributes:
        member: Position in the group.
        start, count: The range, in elements of the slice.
        start_bytes, nbytes: The same in bytes.
        slice_bytes: Bytes of the whole slice: those of rank r begin at r times this in the wgrad.
        in_mailbox: Offset in bytes, a multiple of 256.
    """

    member: int
    start: int
    count: int
    start_bytes: int
    nbytes: int
    slice_bytes: int
    in_mailbox: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReducePlan:
    """Messages, each of parts that fit a mailbox together."""

    domain: Domain
    messages: tuple[tuple[Part, ...], ...]


def plan_gather(domain: Domain, group: WeightGroup, pulls: Sequence[int], local: int, *, in_place: bool) -> GatherPlan:
    """Deals the copies of a group over streams: peers' shards over `pulls`, this rank's own on `local` if not in place.

    One stream saturates the link to one peer (352 GB/s between two H200s; 343 when its copy is split over two streams).
    """
    sizes = [m.send.numel() * m.send.element_size() for m in group.members]

    def shards_of(rank: int) -> list[Copy]:
        return [
            (position, rank * size, domain.address(member, rank), size)
            for position, (member, size) in enumerate(zip(group.members, sizes, strict=True))
            if size
        ]

    # Staggered: at any moment every rank reads from another one.
    remote = [shards_of((domain.rank + step) % domain.size) for step in range(1, domain.size)]
    own = [] if in_place else shards_of(domain.rank)
    if sum(sizes) * len(remote) < SPLIT_BYTES:
        everything = (*chain.from_iterable(remote), *own)
        return GatherPlan(domain, ((pulls[0], everything),) if everything else ())
    dealt = [tuple(chain.from_iterable(remote[lane :: len(pulls)])) for lane in range(len(pulls))]
    lanes = [*zip(pulls, dealt, strict=True), (local, tuple(own))]
    return GatherPlan(domain, tuple((stream, copies) for stream, copies in lanes if copies))


def plan_messages(counts: Sequence[int], dtype: torch.dtype, domain: Domain) -> tuple[tuple[Part, ...], ...]:
    """Cuts slices of these many elements into messages that fit a mailbox, with several small slices in one."""
    item = dtype.itemsize
    room = (domain.mailboxes[0].stride if domain.mailboxes else 1 << 30) // item
    grain = 256 // item  # elements; a multiple of the 16 that the addition wants
    messages: list[tuple[Part, ...]] = []
    parts: list[Part] = []
    used = 0
    for member, numel in enumerate(counts):
        start = 0
        while start < numel:
            if used >= room:
                messages.append(tuple(parts))
                parts, used = [], 0
            count = min(numel - start, room - used)
            parts.append(Part(member, start, count, start * item, count * item, numel * item, used * item))
            start += count
            used += -(-count // grain) * grain
    if parts:
        messages.append(tuple(parts))
    return tuple(messages)

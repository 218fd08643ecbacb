"""`Reducer`: takes full wgrads, returns their sums to the shards' owners before backward ends."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gtp.config import GTPConfig
from gtp.errors import GTPStateError
from gtp.runtime.buffers import Buffer, BufferPool, nbytes_of
from gtp.runtime.group import Member, ShardOwner, WeightGroup
from gtp.runtime.held import GradientMark
from gtp.runtime.reduction_order import ReductionOrder
from gtp.runtime.transport import Transport


class _Room(NamedTuple):
    """What a wgrad of one member and dtype takes up: its padded shape, as a list of one, and the bytes of a buffer."""

    shapes: list[tuple[int, ...]]
    nbytes: int


@dataclasses.dataclass(eq=False, slots=True)
class _Wgrad:
    """A full wgrad of a member in padded, pooled memory: what the wire reads."""

    member: Member
    buffer: Buffer
    padded: torch.Tensor


@dataclasses.dataclass(eq=False, slots=True)
class _InFlight:
    ticket: Any
    wgrads: list[_Wgrad]
    nbytes: int


class Reducer:
    """Starts one reduction per finalize, keeps a bounded number in flight, delivers when backward ends.

    Several finalizes of one weight in one backward (a tied or repeated layer) each start a reduction into the same
    target, in order. With `accumulate_only` set (no_sync) nothing is sent: full-size sums are held here, in fp32 or
    wider, until a backward that reduces.
    """

    def __init__(
        self,
        groups: list[WeightGroup],
        pool: BufferPool,
        transport: Transport,
        config: GTPConfig,
        window_bytes: int,
        order: ReductionOrder,
    ) -> None:
        self._groups = groups
        self._order = order
        self._pool = pool
        self._transport = transport
        self._reduce_dtype = config.reduce_dtype
        self._divisors = [1 if config.grad_reduce == "sum" else _ranks_of(group) for group in groups]
        self._window_bytes = window_bytes
        self._rooms: dict[tuple[Member, torch.dtype], _Room] = {}
        self._lent: dict[int, _Wgrad] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._in_flight_bytes = 0
        self._targets: dict[Member, tuple[ShardOwner, torch.Tensor]] = {}
        self._unreduced: dict[Member, _Wgrad] = {}
        self._marks: dict[Member, GradientMark | None] = {}  # see [Note: zeroing what is not there]
        self._returned: set[Member] = set()  # whose gradients this backward has returned
        self.accumulate_only = False
        self.bytes_reduced = 0

    def grad_buffer(self, group: WeightGroup, position: int) -> torch.Tensor:
        """Memory for the wgrad of one member, `[rows, *trailing]`, contents undefined."""
        member = group.members[position]
        wgrad = self._lease(group, member, self._reduce_dtype or group.compute_dtype)
        padded = wgrad.padded
        full = padded.detach() if member.rows == member.shard_rows * group.size else padded[: member.rows]
        self._lent[full.data_ptr()] = wgrad
        return full

    def finalize(self, group: WeightGroup, wgrads: Sequence[torch.Tensor | None]) -> None:
        """Takes the full wgrads of a group: those of `grad_buffer` are kept, and copies of others. None: no part of
        the group's use came from this weight, and so it gets none."""
        if len(wgrads) > 1:
            self._require_order(group, wgrads)
        _require_logical_shapes(group, wgrads)
        pairs = zip(group.members, wgrads, strict=True)
        trained = [wgrad is not None and self._owner(member).wants_gradient() for member, wgrad in pairs]
        padded = self._take_all(group, wgrads)
        if self.accumulate_only:
            for member, contribution, gets in zip(group.members, padded, trained, strict=True):
                if gets:
                    self._hold(group, member, contribution)
                else:
                    self._pool.let_go(contribution.buffer)
            return
        if self._unreduced:
            self._add_to_held(group, padded, trained)
        self._start(group, padded if len(padded) == 1 else self._alike(group, padded), trained)

    def reduce_returned(
        self, group: WeightGroup, wgrads: Sequence[torch.Tensor | None], *, at_once: bool
    ) -> list[torch.Tensor]:
        """The reduced gradients of the shards in fresh tensors.

        Args:
            at_once: Whether they are complete now, in the order of the current stream; else when backward ends. The
                second one of a weight is complete now in any case, and so is the first, since autograd adds them up.
        """
        if len(wgrads) > 1:
            self._require_order(group, wgrads)
        _require_logical_shapes(group, wgrads)
        padded = self._alike(group, self._take_all(group, wgrads))
        into = [self._owner(member).new_gradient() for member in group.members]
        self._send(group, padded, into, [False] * len(into))
        at_once = at_once or not self._returned.isdisjoint(group.members)
        self._returned.update(group.members)
        while self._in_flight and at_once:
            self._finish_oldest()
        return into

    def end_backward(self) -> list[ShardOwner]:
        """Completes everything, delivers it, and returns the owners that received a gradient, in order of arrival."""
        while self._in_flight:
            self._finish_oldest()
        delivered = list(self._targets.values())
        for owner, target in delivered:
            owner.gradient_delivered(target)
        self._targets.clear()
        self._forget_backward()
        return [owner for owner, _ in delivered]

    def switch(self, pool: BufferPool, *, ends: bool) -> None:
        """A CUDA graph capture begins, or one ends. A backward that raised in that one has left reductions on their
        way; they are part of a graph that is thrown away, and eager code may not wait for its events.

        Raises:
            GTPStateError: gradients are on their way, or held by `no_sync`: they would belong to both sides.
        """
        if self._unreduced or (self._in_flight and not ends):
            raise GTPStateError(
                "a CUDA graph capture begins or ends while gradients are being reduced or are held by no_sync: capture "
                "whole steps, and end no_sync with a reducing backward first"
            )
        if ends:
            self._targets.clear()
        while self._in_flight:
            self._finish_oldest(wait=False)
        self._forget_backward()
        self._pool = pool

    def abandon(self) -> None:
        """After a backward that raised: nothing more of it is delivered. What `no_sync` holds from earlier ones stays.

        A reduction that is added when it is finished must not reach a `.grad` that was zeroed in the meantime.
        """
        before = [(target, target.clone()) for _, target in self._targets.values()] if self._in_flight else []
        self._targets.clear()  # first of all: a transport that fails once more must not leave them for the next step
        self._forget_backward()
        while self._in_flight:
            self._finish_oldest()
        for target, value in before:
            target.copy_(value)

    def _forget_backward(self) -> None:
        self._returned.clear()
        for wgrad in self._lent.values():
            self._pool.let_go(wgrad.buffer)
        self._lent.clear()

    def discard_held(self) -> None:
        """Drops gradients that `no_sync` accumulated and nobody reduced."""
        for wgrad in self._unreduced.values():
            self._pool.let_go(wgrad.buffer)
        self._unreduced.clear()
        self._marks.clear()

    @property
    def held_bytes(self) -> int:
        """Full-size gradients held because of `no_sync`."""
        return sum(w.buffer.nbytes for w in self._unreduced.values())

    def _lease(self, group: WeightGroup, member: Member, dtype: torch.dtype) -> _Wgrad:
        room = self._rooms.get((member, dtype))
        if room is None:
            shapes = [member.padded_shape(group.size)]
            room = self._rooms[member, dtype] = _Room(shapes, nbytes_of(shapes, dtype))
        buffer = self._pool.lease(room.nbytes)
        if buffer.events:
            self._pool.await_events(buffer)
        (padded,) = buffer.views((room.shapes[0], dtype), room.shapes, dtype)
        if room.shapes[0] != member.logical_shape:
            padded[member.rows :].zero_()
        return _Wgrad(member, buffer, padded)

    def _take_all(self, group: WeightGroup, wgrads: Sequence[torch.Tensor | None]) -> list[_Wgrad]:
        return [
            self._zeros(group, member) if wgrad is None else self._take(group, member, wgrad)
            for member, wgrad in zip(group.members, wgrads, strict=True)
        ]

    def _take(self, group: WeightGroup, member: Member, wgrad: torch.Tensor) -> _Wgrad:
        lent = self._lent.pop(wgrad.data_ptr(), None)
        if lent is not None and lent.member is member and _is_laid_out_as(wgrad, lent.padded):
            return lent
        own = self._lease(group, member, self._reduce_dtype or wgrad.dtype)
        own.padded[: member.rows].copy_(wgrad)
        if lent is not None:  # another view of that memory, which has been read now
            self._pool.let_go(lent.buffer)
        return own

    def _require_order(self, group: WeightGroup, wgrads: Sequence[torch.Tensor | None]) -> None:
        """The leader answers for a group and does not see who asks for what: the buffers, asked of each, show it."""
        for member, wgrad in zip(group.members, wgrads, strict=True):
            lent = None if wgrad is None else self._lent.get(wgrad.data_ptr())
            if lent is not None and lent.member is not member:
                raise GTPStateError(
                    f"{lent.member.name} was used in the place of {member.name}: weights that are gathered together "
                    f"are used once each and in their order ({', '.join(m.name for m in group.members)}), none of "
                    "another group among them, and so the forward computed with others' values. To use them in another "
                    "order, move the rows of the input, or shard them one by one and use each by itself"
                )

    def _alike(self, group: WeightGroup, padded: list[_Wgrad]) -> list[_Wgrad]:
        """All in the widest dtype among them, as transports want the wgrads of one group."""
        dtypes = {wgrad.padded.dtype for wgrad in padded}
        if len(dtypes) == 1:
            return padded
        widest = functools.reduce(torch.promote_types, dtypes)
        return [
            wgrad if wgrad.padded.dtype == widest else self._widened(group, member, wgrad, widest)
            for member, wgrad in zip(group.members, padded, strict=True)
        ]

    def _widened(self, group: WeightGroup, member: Member, wgrad: _Wgrad, dtype: torch.dtype) -> _Wgrad:
        """A copy of `wgrad`, which is let go."""
        wide = self._lease(group, member, dtype)
        wide.padded.copy_(wgrad.padded)
        self._pool.let_go(wgrad.buffer)
        return wide

    def _hold(self, group: WeightGroup, member: Member, wgrad: _Wgrad) -> None:
        held = self._held(member)
        if held is not None:
            held.padded += wgrad.padded
            self._pool.let_go(wgrad.buffer)
        else:
            wide = torch.promote_types(wgrad.padded.dtype, torch.float32)
            self._unreduced[member] = self._widened(group, member, wgrad, wide)
            self._marks[member] = self._owner(member).mark_held()

    def _held(self, member: Member) -> _Wgrad | None:
        """What is held for a member, unless the user has zeroed its gradient since."""
        held = self._unreduced.get(member)
        if held is None:
            return None
        mark = self._marks.get(member)
        if mark is not None and self._owner(member).was_zeroed_since(mark):
            self._pool.let_go(self._unreduced.pop(member).buffer)
            return None
        return held

    def _add_to_held(self, group: WeightGroup, padded: list[_Wgrad], trained: list[bool]) -> None:
        """Where earlier backwards held something for a member, its entry of `padded` becomes the sum, and it gets it
        even if it was frozen since."""
        for position, member in enumerate(group.members):
            held = self._held(member)
            if held is not None:
                del self._unreduced[member]
                if trained[position]:
                    held.padded += padded[position].padded
                self._pool.let_go(padded[position].buffer)
                padded[position], trained[position] = held, True

    def flush_held(self) -> None:
        """At the end of a backward that reduces: starts with what earlier ones held and it had nothing to add to."""
        if self.accumulate_only:
            return
        for member in list(self._unreduced):
            self._held(member)
        if not self._unreduced:
            return
        for group in self._groups:
            if any(member in self._unreduced for member in group.members):
                held = [self._unreduced.pop(member, None) for member in group.members]
                padded = [h or self._zeros(group, member) for h, member in zip(held, group.members, strict=True)]
                self._start(group, self._alike(group, padded), [h is not None for h in held])

    def _zeros(self, group: WeightGroup, member: Member) -> _Wgrad:
        """What travels for a member that has nothing to add."""
        wgrad = self._lease(group, member, self._reduce_dtype or group.compute_dtype)
        wgrad.padded.zero_()
        return wgrad

    def _start(self, group: WeightGroup, padded: list[_Wgrad], trained: list[bool]) -> None:
        """
        Args:
            trained: Per member whether it gets what is reduced for it.
        """
        into: list[torch.Tensor] = []
        accumulate: list[bool] = []
        for member, gets in zip(group.members, trained, strict=True):
            owner = self._owner(member)
            known = self._targets.get(member)
            if not gets:
                target, has_value = owner.new_gradient(), False
            elif known is None:
                target, has_value = owner.gradient_target()
                self._targets[member] = owner, target
            else:
                (_, target), has_value = known, True
            into.append(target)
            accumulate.append(has_value)
        self._order.note(group)
        self._send(group, padded, into, accumulate)

    def _send(self, group: WeightGroup, padded: list[_Wgrad], into: list[torch.Tensor], accumulate: list[bool]) -> None:
        nbytes = sum([w.buffer.nbytes for w in padded])
        divisor = self._divisors[group.index]
        ticket = self._transport.start_reduce(group, [w.padded for w in padded], into, accumulate, divisor)
        self.bytes_reduced += nbytes
        self._in_flight.append(_InFlight(ticket, padded, nbytes))
        self._in_flight_bytes += nbytes
        while self._in_flight_bytes > self._window_bytes and len(self._in_flight) > 1:
            self._finish_oldest()

    def _owner(self, member: Member) -> ShardOwner:
        owner = member.owner()
        if owner is None:
            raise GTPStateError(f"{member.name}: its parameter was deleted while backward was running")
        return owner

    def _finish_oldest(self, *, wait: bool = True) -> None:
        flight = self._in_flight.popleft()
        self._in_flight_bytes -= flight.nbytes
        try:
            if wait:
                self._transport.finish_reduce(flight.ticket)
        finally:
            for wgrad in flight.wgrads:
                self._pool.let_go(wgrad.buffer)


def _ranks_of(group: WeightGroup) -> int:
    """How many ranks contribute to a gradient."""
    return group.size * (1 if group.replicate_group is None else group.replicate_group.size())


def _require_logical_shapes(group: WeightGroup, wgrads: Sequence[torch.Tensor | None]) -> None:
    for member, wgrad in zip(group.members, wgrads, strict=True):
        if wgrad is not None and wgrad.shape != member.logical_shape:
            raise GTPStateError(
                f"{member.name}: a wgrad has the logical shape {member.logical_shape}, got {tuple(wgrad.shape)}"
            )


def _is_laid_out_as(wgrad: torch.Tensor, padded: torch.Tensor) -> bool:
    """Whether `wgrad`, of the logical shape, which begins where `padded` does, is its first rows and not another view
    of that memory."""
    return wgrad.dtype is padded.dtype and wgrad.stride() == padded.stride()

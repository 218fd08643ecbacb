"""`Gatherer`: runs the schedule's decisions. Holds the gathered copies that wait for their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gtp.errors import GTPStateError
from gtp.runtime.buffers import Buffer, BufferPool, nbytes_of
from gtp.runtime.group import WeightGroup
from gtp.runtime.parts import Scope
from gtp.runtime.schedule import Phase, Schedule
from gtp.runtime.transport import Transport


class _Copy:
    """A gathered copy of one group: in flight while `ticket` is set, resident until its holds end."""

    __slots__ = ("buffer", "outs", "ticket", "versions")

    def __init__(self, buffer: Buffer, outs: list[torch.Tensor], ticket: Any, versions: list[int]) -> None:
        self.buffer = buffer
        self.outs = outs
        self.ticket = ticket
        self.versions = versions


class Gatherer:
    """Gathers weights when they are asked for, and before that where the schedule says so.

    [Note: no stale reads] A copy is good for one version of the shards. Three rules keep it so. A line (see
    [Note: lines]) ends every copy, so whatever happened between a backward and the next forward is seen, also writes
    through aliases that bump no version counter. Within a line, a copy is used only if the shards' version counters are
    those it was gathered at. And a shard about to be written in place is first taken out of flight (`before_write`).

    A consume outside every bracket (a submodule called by hand) uses no copy made earlier and leaves none.

    Where shards become current only after a line has begun, because somebody is still gathering them over replicas,
    `before_gather` is called before a shard is read: by a gather, or, where peers read it by themselves, by `open`.

    Args:
        before_gather: Makes the shards of a group current in the order of the current stream; returns whether it had
            to wait for anything. None: they are current when a line begins.
    """

    def __init__(
        self,
        groups: list[WeightGroup],
        schedule: Schedule,
        pool: BufferPool,
        transport: Transport,
        before_gather: Callable[[WeightGroup], bool] | None = None,
    ) -> None:
        self._groups = groups
        self._whole = Scope(schedule, groups)
        self._scope = self._whole  # to which the open line belongs, or the next one
        self._schedule = schedule  # its schedule
        self._pool = pool
        self._transport = transport
        self._before_gather = before_gather
        self._shapes = [[m.padded_shape(g.size) for m in g.members] for g in groups]
        self._nbytes = [nbytes_of(shapes, g.compute_dtype) for shapes, g in zip(self._shapes, groups, strict=True)]
        self._places = [transport.place(g) for g in groups]
        self._resident: dict[int, _Copy] = {}
        # Where `send` is a copy of the shard, by group: the versions it was copied at.
        self._sent: dict[int, list[int]] = {
            g.index: [] for g in groups if any(m.send is not m.shard for m in g.members)
        }
        self._line: int | None = None  # the capture in which the open line began, 0 for none; None when none is open
        self._interrupted = False  # whether the open line's transport is closed, because a shard was written
        self._capture = 0
        self.bytes_gathered = 0

    def open_line(self) -> None:
        """A forward begins: shards are current from here on."""
        decision = self._schedule.open()
        self._end_line(decision.drop)
        self._publish()
        for coming in decision.prefetch:
            self._resident[coming] = self._start(self._groups[coming])

    def close_line(self) -> None:
        """Shards may be written once this returns."""
        self._end_line(self._schedule.close().drop)
        if self._scope is not self._whole:
            used = dict.fromkeys([index for index, _ in self._schedule.trace])
            self._scope.use([self._groups[index] for index in used])
            self._enter(self._whole)

    def open_part(self, scope: Scope) -> None:
        """A forward or a backward of a part begins: see [Note: parts]. It ends with `close_line`."""
        self.require_no_line()
        self._enter(scope)
        self.open_line()

    @property
    def line_open(self) -> bool:
        return self._line is not None

    @property
    def in_part(self) -> bool:
        """Whether the open line is a part's."""
        return self._scope is not self._whole

    def consume(self, group: WeightGroup, phase: Phase, *, inside: bool) -> list[torch.Tensor]:
        """The full weights of `group` for one GEMM. Each tensor is its own lease."""
        index = group.index
        if inside and self._line is None and not self._capture:
            # a backward after another one's end (two forwards, two backwards), or behind no forward of the root
            self._publish()
        inside = inside and self._line == self._capture
        decision = self._schedule.consume(index, phase, inside=inside)
        if not inside:
            return self._consume_alone(group)
        for dropped in decision.drop:
            self._drop(dropped)
        copy = self._resident.get(index)
        if copy is not None and copy.versions != _versions(group):
            self._drop(index)
            self._schedule.forget(index)
            copy = None
        if copy is None:
            # resident until it is handed out, so that it is let go like the others if memory runs out in between
            copy = self._resident[index] = self._start(group)
        for coming in decision.prefetch:
            self._resident[coming] = self._start(self._groups[coming])
        full = self._hand_out(group, copy)
        if not decision.keep:
            del self._resident[index]
            self._pool.let_go(copy.buffer)
        return full

    def before_write(self, groups: Sequence[WeightGroup]) -> None:
        """Shards of `groups` are about to be written in place: no gather may be reading them, on any rank.

        In the middle of a line, the transport's is interrupted until the next gather; copies of other shards stay.
        """
        if self._line is not None and not self._interrupted:
            self._finish_all()
            self._transport.close()
            self._interrupted = True
        if self._pool.leased_bytes:
            for group in groups:
                place = self._places[group.index]
                if place is not None:
                    self._pool.shard_written(place)

    def drop_all(self) -> None:
        """After an exception or for `release`: nothing stays resident, nothing stays in flight."""
        self._end_line(self._schedule.reset())
        self._enter(self._whole)

    def require_no_line(self) -> None:
        """A capture is about to begin: no forward may wait for its backward.

        Raises:
            GTPStateError: one does.
        """
        if self._line is not None:
            raise GTPStateError(
                "a CUDA graph capture begins while a forward of the model, run in grad mode, waits for its backward: "
                "what it began with other ranks would end inside the graph. Before the capture, run that backward or "
                "call runtime.release(); forwards without backward belong under torch.no_grad()"
            )

    def switch(self, pool: BufferPool, capture: int) -> None:
        """A capture begins or has ended: copies of before are of no use. See [Note: captures]."""
        for copy in self._resident.values():
            self._pool.let_go(copy.buffer)
        self._resident.clear()
        for scope in dict.fromkeys([self._scope, self._whole]):
            scope.schedule.reset()
        self._enter(self._whole)
        self._pool = pool
        self._capture = capture

    def _consume_alone(self, group: WeightGroup) -> list[torch.Tensor]:
        was_open = self._line is not None
        if was_open and self._line != self._capture:
            raise GTPStateError(
                f"{group.name}: a CUDA graph capture began inside a forward or backward of the model, or ended before "
                "it. Capture whole steps (forward and backward), or layers outside of any forward"
            )
        if was_open and not self._interrupted:
            self._finish_all()
            self._transport.close()
        self._interrupted = False
        self._open(self._scope.groups if was_open else [group])
        try:
            copy = self._start(group)
            full = self._hand_out(group, copy)
            self._pool.let_go(copy.buffer)
        finally:
            if not was_open:
                self._transport.close()
        return full

    def _end_line(self, dropped: Sequence[int]) -> None:
        for index in dropped:
            self._drop(index)
        for index in list(self._resident):
            self._drop(index)
        if self._line is not None:
            if not self._interrupted:
                self._transport.close()
            self._line = None
            self._interrupted = False

    def _enter(self, scope: Scope) -> None:
        self._scope, self._schedule = scope, scope.schedule

    def _publish(self) -> None:
        """Begins a line."""
        self._open(self._scope.groups)
        self._line = self._capture
        self._interrupted = False

    def _open(self, groups: Sequence[WeightGroup]) -> None:
        """All shards of `groups` are current from here on, or when `before_gather` has said so."""
        if self._before_gather is not None and (self._transport.peers_read or self._sent):
            for group in groups:
                self._before_gather(group)
        self._refresh(groups)
        self._transport.open(groups)

    def _refresh(self, groups: Sequence[WeightGroup]) -> None:
        """Makes `send` what the shard is now, where it is a copy."""
        for group in groups:
            if group.index in self._sent:
                self._sent[group.index] = _versions(group)
                for member in group.members:
                    if member.send is not member.shard:
                        member.send.copy_(member.shard)

    def _start(self, group: WeightGroup) -> _Copy:
        index = group.index
        if index not in self._scope.indices:
            self._widen(group)
        if self._interrupted:
            self._publish()
        if self._before_gather is not None and self._before_gather(group):
            self._transport.now_current(group)
        versions = _versions(group)
        if self._sent.get(index, versions) != versions:
            self._refresh([group])  # written since the line began
        buffer = self._pool.lease(self._places[index] or self._nbytes[index])
        outs = buffer.views(index, self._shapes[index], group.compute_dtype)
        if self._capture:
            self._pool.join_readers(buffer)  # there, transports may fork from the current stream alone
        ticket = self._transport.start_gather(group, outs, buffer.events)
        if buffer.events:
            self._pool.recycle_events(buffer)
        self.bytes_gathered += self._nbytes[index]
        return _Copy(buffer, outs, ticket, versions)

    def _widen(self, group: WeightGroup) -> None:
        """The part uses a group that it did not use in its warm-up."""
        self._scope.use([*self._scope.groups, group])
        if not self._interrupted:
            self._finish_all()
            self._transport.close()
            self._interrupted = True

    def _finish(self, copy: _Copy) -> None:
        if copy.ticket is not None:
            ticket, copy.ticket = copy.ticket, None
            try:
                self._transport.finish_gather(ticket)
            except Exception:
                copy.versions = []  # of no shard: whoever tries again does not get what has not arrived
                raise

    def _finish_all(self) -> None:
        for copy in self._resident.values():
            self._finish(copy)
            self._pool.used(copy.buffer)

    def _drop(self, index: int) -> None:
        copy = self._resident.pop(index, None)
        if copy is not None:
            self._finish(copy)  # its buffer goes to somebody else, who must not be overtaken by this gather
            self._pool.used(copy.buffer)
            self._pool.let_go(copy.buffer)

    def _hand_out(self, group: WeightGroup, copy: _Copy) -> list[torch.Tensor]:
        self._finish(copy)
        full = []
        for member, out in zip(group.members, copy.outs, strict=True):
            # a fresh object, whose end is seen; slicing costs twice as much
            tensor = out.detach() if member.rows == member.shard_rows * group.size else out[: member.rows]
            self._pool.hand_out(copy.buffer, tensor)
            full.append(tensor)
        return full


def _versions(group: WeightGroup) -> list[int]:
    return [m.shard._version for m in group.members]

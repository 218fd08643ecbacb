"""`ProcessGroupTransport`: torch.distributed collectives. Runs everywhere, NCCL and gloo, any group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from gtp.runtime.group import WeightGroup
from gtp.runtime.transport import Transport


@dataclasses.dataclass(eq=False, slots=True)
class _GatherTicket:
    works: list[dist.Work]
    done: torch.cuda.Event | None


@dataclasses.dataclass(eq=False, slots=True)
class _ReduceTicket:
    group: WeightGroup
    works: list[dist.Work]
    received: list[torch.Tensor]
    into: list[torch.Tensor]
    accumulate: list[bool]
    divisor: int
    done: torch.cuda.Event | None


class ProcessGroupTransport(Transport):
    """Gathers with all-gathers; reduces by exchanging slices (all-to-all) and adding them here.

    [Note: exchange, then add] A ring reduce-scatter adds in the wire's dtype, so bf16 gradients would be rounded at
    every hop. Exchanging the slices moves the same bytes ((R-1)/R of the wgrad per rank), and the addition is ours:
    fp32, in rank order, rounded once. It also makes the result independent of the backend's algorithm.

    On CUDA gathers and reductions are queued on two side streams. On gloo they are async works: the exchange runs in
    the backend's threads, and the addition happens when the reduction is finished.

    [Note: nothing is coalesced on gloo] NCCL takes a group's members in one collective; gloo takes one each. After a
    collective, gloo's two threads write its name into one string of the process group, without a lock (seen in torch
    2.11.0 and 2.14.1). "ALLGATHER_COALESCED" has more characters than such a string holds in itself, so its memory is
    freed and written by both at once, and the heap is damaged. The names of the collectives used here fit. Packing the
    members into one gather would hide from `gtp.testing.collectives` who reads a weight too early.
    """

    name = "process_group"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gathers = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._reductions = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def open(self, groups: Sequence[WeightGroup]) -> None:
        if self._gathers is not None:
            self._gathers.wait_stream(torch.cuda.current_stream(self._device))

    def now_current(self, group: WeightGroup) -> None:
        self.open([group])

    def start_gather(
        self, group: WeightGroup, out: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event]
    ) -> _GatherTicket:
        if self._gathers is None:
            return _GatherTicket(self._all_gather(group, out), None)
        for event in after:
            self._gathers.wait_event(event)
        with torch.cuda.stream(self._gathers):
            for work in self._all_gather(group, out):
                work.wait()  # orders the side stream after NCCL's own; does not block the host
            done = torch.cuda.Event()
            done.record(self._gathers)
        return _GatherTicket([], done)

    def finish_gather(self, ticket: _GatherTicket) -> None:
        _wait_for_all(ticket.works)
        if ticket.done is not None:
            ticket.done.wait(torch.cuda.current_stream(self._device))

    def start_reduce(
        self,
        group: WeightGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> _ReduceTicket:
        # Allocated on the current stream: the side stream is ordered after it, and it outlives the ticket's `finish`,
        # after which the current stream is ordered after the side stream.
        received = [torch.empty_like(wgrad) for wgrad in wgrads] if group.size > 1 else list(wgrads)
        ticket = _ReduceTicket(group, [], received, list(into), list(accumulate), divisor, None)
        if self._reductions is None:
            ticket.works = self._exchange(group, wgrads, received)
            return ticket
        self._reductions.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._reductions):
            for work in self._exchange(group, wgrads, received):
                work.wait()
            self._add(ticket)
            ticket.done = torch.cuda.Event()
            ticket.done.record(self._reductions)
        return ticket

    def finish_reduce(self, ticket: _ReduceTicket) -> None:
        if ticket.done is not None:
            ticket.done.wait(torch.cuda.current_stream(self._device))
            return
        _wait_for_all(ticket.works)
        self._add(ticket)

    def shutdown(self) -> None:
        for stream in (self._gathers, self._reductions):
            if stream is not None and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self._device).wait_stream(stream)

    def _all_gather(self, group: WeightGroup, out: Sequence[torch.Tensor]) -> list[dist.Work]:
        with self._one_collective(group) as works:
            for member, full in zip(group.members, out, strict=True):
                works.append(dist.all_gather_into_tensor(full, member.send, group=group.process_group, async_op=True))
        return works

    def _exchange(
        self, group: WeightGroup, wgrads: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> list[dist.Work]:
        if group.size == 1:
            return []
        with self._one_collective(group) as works:
            for wgrad, slices in zip(wgrads, received, strict=True):
                works.append(dist.all_to_all_single(slices, wgrad, group=group.process_group, async_op=True))
        return works

    @contextmanager
    def _one_collective(self, group: WeightGroup) -> Iterator[list[dist.Work]]:
        """Calls made inside, one per member, become one collective on NCCL. The list holds the works afterwards.
        See [Note: nothing is coalesced on gloo]."""
        works: list[dist.Work] = []
        if len(group.members) == 1 or not self._is_nccl(group):
            yield works
            return
        with _coalescing_manager(group.process_group, device=self._device, async_ops=True) as manager:
            yield works
        works[:] = [manager]

    def _is_nccl(self, group: WeightGroup) -> bool:
        """Ranks that share a GPU have gloo there, too."""
        return self._device.type == "cuda" and group.process_group._get_backend(self._device).name() == "nccl"

    def _add(self, ticket: _ReduceTicket) -> None:
        group = ticket.group
        for member, received, into, accumulate in zip(
            group.members, ticket.received, ticket.into, ticket.accumulate, strict=True
        ):
            slices = received.view(group.size, member.shard_rows, *member.trailing)
            wide = torch.float64 if torch.float64 in (into.dtype, received.dtype) else torch.float32
            total = slices[0].to(wide, copy=True)
            for rank in range(1, group.size):
                total += slices[rank]
            if group.replicate_group is not None:
                dist.all_reduce(total, group=group.replicate_group)
            if ticket.divisor != 1:
                total /= ticket.divisor
            if accumulate:
                total += into
            into.copy_(total)


def _wait_for_all(works: Sequence[dist.Work]) -> None:
    """Where an interrupt comes in between, for the others, too: buffers of what is in flight may not be used again."""
    for position, work in enumerate(works):
        try:
            work.wait()
        except Exception:
            raise  # the process group is broken
        except BaseException:
            _wait_for_all(works[position + 1 :])
            raise


def gather_now(shard: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' shards, one after the other along dim 0, in fresh memory. Collective, outside every schedule."""
    size = process_group.size()
    out = torch.empty((shard.shape[0] * size, *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    if size == 1:
        out.copy_(shard)
    else:
        dist.all_gather_into_tensor(out, shard.contiguous(), group=process_group)
    return out

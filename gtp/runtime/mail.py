"""`Mail`: every rank sends the slices of its wgrads to their owners, and each owner adds what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.ops.peer import Driver
from gtp.runtime.copy_plans import Part, ReducePlan
from gtp.runtime.domain import Domain, Mailbox
from gtp.runtime.events import Events, Ticket


class Mail:
    """Copies into the peers' mailboxes, and additions of what they sent, on streams of its own.

    Args:
        driver, events: What to run on.
        device: This rank's GPU.
        adder: Makes an addition for a rank, a group size and a number of SMs. None: `FusedAdd`.
        sms: Upper bound on the SMs that an addition takes.
    """

    def __init__(self, driver: Driver, events: Events, device: torch.device, adder: Any, sms: int) -> None:
        self._driver = driver
        self._events = events
        self._device = device
        self._adder = adder
        self._sms = sms
        self._adders: dict[tuple[int, int], Any] = {}
        self._released: dict[tuple[Domain, int], tuple[int, int]] = {}  # by mailbox: event, and the capture it is of
        self.streams = (driver.new_stream(), driver.new_stream())  # that carry contributions
        self._adds = driver.new_stream()

    @property
    def all_streams(self) -> tuple[int, ...]:
        """Where contributions travel, and where they are added."""
        return (*self.streams, self._adds)

    def reduce(
        self,
        plan: ReducePlan,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
        shared: bool = False,
    ) -> Ticket:
        """`shared`: every rank gets the whole of every wgrad, instead of the slice that is its own."""
        driver, domain = self._driver, plan.domain
        capture = driver.capture()
        ready, sent = self._events.take(), self._events.take()
        driver.record(ready, driver.current_stream())
        if domain.size == 1:  # else it waits for what was sent, which waits for this
            driver.wait_event(self._adds, ready)
        wire = wgrads[0].dtype
        addresses = [wgrad.data_ptr() for wgrad in wgrads]
        add = self._adder_for(domain)
        for message in plan.messages:
            mailbox = self._push(domain, message, addresses, ready, sent, capture, shared)
            rank = 0 if shared else domain.rank
            for part in message:
                add(
                    into[part.member],
                    part.start,
                    addresses[part.member] + rank * part.slice_bytes + part.start_bytes,
                    mailbox.inbox + part.in_mailbox if mailbox else addresses[part.member],
                    (mailbox.stride // wire.itemsize) if mailbox else 0,
                    part.count,
                    wire,
                    divisor,
                    accumulate[part.member],
                    self._adds,
                )
            if mailbox:
                driver.submit(mailbox.hands.release, self._adds)
                self._note_release(domain, mailbox, capture)
        self._events.give(sent)
        driver.record(ready, self._adds)
        # The additions know addresses only, and of what a frozen weight gets nobody else has the memory.
        return Ticket([ready], into)

    def _push(
        self,
        domain: Domain,
        message: tuple[Part, ...],
        addresses: list[int],
        ready: int,
        sent: int,
        capture: int,
        shared: bool,
    ) -> Mailbox | None:
        """Sends this rank's contributions, and makes the addition wait for what the peers send."""
        if domain.size == 1:
            return None
        driver = self._driver
        mailbox = domain.next_mailbox(bool(capture))
        released, within = self._released.get((domain, mailbox.index), (0, 0))
        for lane in mailbox.lanes:
            driver.wait_event(lane.stream, ready)
            if capture and capture == within:
                driver.wait_event(lane.stream, released)
            driver.submit(lane.reclaim, lane.stream)
            for peer in lane.peers:
                outbox, rank = mailbox.outbox[peer], 0 if shared else peer
                for part in message:
                    source = addresses[part.member] + rank * part.slice_bytes + part.start_bytes
                    driver.copy(outbox + part.in_mailbox, source, part.nbytes, lane.stream)
            driver.submit(lane.post, lane.stream)
            driver.record(sent, lane.stream)
            # See [Note: no deadlock]: also what makes `wgrads` free when the additions are done.
            driver.wait_event(self._adds, sent)
        driver.submit(mailbox.hands.await_posts, self._adds)
        return mailbox

    def _note_release(self, domain: Domain, mailbox: Mailbox, capture: int) -> None:
        """In a graph, orders the next wait for this mailbox after this rank's own use: see [Note: no deadlock].

        Eager code has that order anyway, from the order in which it queues.
        """
        if not capture:
            return
        key = (domain, mailbox.index)
        event = self._released[key][0] if key in self._released else self._driver.new_event()
        self._driver.record(event, self._adds)
        self._released[key] = (event, capture)

    def reduce_twice(
        self,
        plan: ReducePlan,
        replicate_group: dist.ProcessGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> Ticket:
        """Over the group into fp32, from there over the replicas by their collective, from there into the target."""
        wide = torch.float64 if torch.float64 in (into[0].dtype, wgrads[0].dtype) else torch.float32
        totals = [torch.empty(target.shape, dtype=wide, device=target.device) for target in into]
        ticket = self.reduce(plan, wgrads, totals, [False] * len(into), 1)
        with torch.cuda.stream(torch.cuda.ExternalStream(self._adds, device=self._device)):
            for total in totals:
                dist.all_reduce(total, group=replicate_group)
        alone = self._adder_for(None)
        for total, target, adds_up in zip(totals, into, accumulate, strict=True):
            own = total.data_ptr()
            alone(target, 0, own, own, 0, total.numel(), wide, divisor, adds_up, self._adds)
        self._driver.record(ticket.events[0], self._adds)
        ticket.keep = (totals, into)
        return ticket

    def _adder_for(self, domain: Domain | None) -> Any:
        rank, size = (0, 1) if domain is None else (domain.rank, domain.size)
        adder = self._adders.get((rank, size))
        if adder is None:
            make = self._adder
            if make is None:
                from gtp.ops.kernels.fused_add import FusedAdd as make
            adder = self._adders[rank, size] = make(rank, size, self._sms)
        return adder

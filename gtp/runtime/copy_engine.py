"""`CopyEngineTransport`: peer copies and stream memory operations. No kernel but one addition, no SM but for that.

A gather pulls: every rank reads its peers' shards, which lie in memory mapped by all, between "published" at `open`
and "finished reading" at `close`. No gather waits for anybody. A reduction pushes: every rank copies the slices of its
wgrad that belong to others into their mailboxes, and each owner adds what arrived. So wgrads and gathered weights live
in ordinary memory, and all memory that ranks must agree on is allocated once, in `prepare`.

[Note: no deadlock] Streams that look independent may share a hardware queue, and a graph may put independent branches
in any order. So every wait for a peer is queued behind, and ordered after, everything of this rank that a peer might be
waiting for at that point. Were each rank to run its whole queue strictly in order, all waits would still end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError
from gtp.ops.peer import Arena, CudaDriver, Driver, LocalArena, SymmetricArena, Watchdog
from gtp.runtime.copy_plans import GatherPlan, Part, ReducePlan, plan_gather, plan_messages
from gtp.runtime.domain import ArenaFactory, Domain, Mailbox
from gtp.runtime.group import Member, WeightGroup
from gtp.runtime.transport import Transport

MAILBOX_BYTES = 64 << 20  # at most: the widest slice of the model may need less
MAILBOXES = 2
FLAT_BYTES = 8 << 20  # replicated gradients beyond this go by a collective, which sends less than all to all

_ADVICE = (
    "all ranks of a GTP group must use the same weights in the same order. GTPConfig(peer_timeout=...) sets the time"
)


@dataclasses.dataclass(eq=False, slots=True)
class _Ticket:
    events: list[int]
    keep: Any = None  # memory that the side streams read or write until then


class CopyEngineTransport(Transport):
    """See the module's header. For groups inside one NVLink domain; `gtp.ops.peer.why_not` tells.

    Args:
        device: This rank's GPU.
        reduce_sms: Upper bound on the SMs that an addition takes.
        peer_timeout: Seconds that a stream may wait for another rank before that rank is reported.
        driver, make_arena, adder: What to run on, for tests: `CudaDriver`, `SymmetricArena` and `FusedAdd` otherwise.
    """

    name = "copy_engine"
    peers_read = True

    def __init__(
        self,
        device: torch.device,
        *,
        reduce_sms: int = 44,
        peer_timeout: float = 600.0,
        driver: Driver | None = None,
        make_arena: ArenaFactory | None = None,
        adder: Any = None,
    ) -> None:
        self._device = device
        self._reduce_sms = reduce_sms
        self._peer_timeout = peer_timeout
        self._driver: Driver = CudaDriver(device) if driver is None else driver
        self._make_arena = make_arena or self._new_arena
        self._adder = adder
        self._adders: dict[tuple[int, int], Any] = {}
        self._watchdog: Watchdog | None = None
        self._events: list[int] = []
        self._domains: dict[dist.ProcessGroup, Domain] = {}
        self._open: list[Domain] = []
        self._released: dict[tuple[Domain, int], tuple[int, int]] = {}  # by mailbox: event, and the capture it is of
        self._opened: int | None = None
        self._gather_plans: list[GatherPlan] = []
        self._reduce_plans: dict[tuple[Any, ...], ReducePlan] = {}
        new = self._driver.new_stream
        self._pulls, self._local = (new(), new()), new()
        self._pushes, self._adds = (new(), new()), new()

    # -- building ------------------------------------------------------------------------------------------------

    def prepare(self, groups: Sequence[WeightGroup]) -> None:
        """Allocates peer memory, one arena per process group, and moves what is gathered into it. Collective."""
        if self._device.type == "cuda":
            self._watchdog = Watchdog(self._device, self._peer_timeout, _ADVICE)
        over: dict[dist.ProcessGroup, list[WeightGroup]] = {}
        for group in groups:
            over.setdefault(group.process_group, []).append(group)
        for process_group, members in over.items():
            self._domains[process_group] = Domain(
                self._driver,
                process_group,
                members,
                self._make_arena,
                mailbox_bytes=MAILBOX_BYTES,
                mailboxes=MAILBOXES,
                send_streams=self._pushes,
                watch=None if self._watchdog is None else self._watchdog.site,
            )
        for group in groups:
            domain = self._domains[group.process_group]
            for member in group.members:
                self._move(domain, member)
            self._gather_plans.append(plan_gather(domain, group, self._pulls, self._local))
        if self._watchdog is not None:
            torch.cuda.synchronize(self._device)
            self._watchdog.start()

    def _new_arena(self, nbytes: int, process_group: dist.ProcessGroup) -> Arena:
        if process_group.size() == 1:
            return LocalArena(nbytes, self._device)
        return SymmetricArena(nbytes, process_group, self._device)

    def _move(self, domain: Domain, member: Member) -> None:
        view = domain.shard_view(member)
        with torch.no_grad():
            view.copy_(member.send)
        if member.send is member.shard:
            member.shard = view
        member.send = view

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of peer memory on this rank: published shards and mailboxes. Not in torch's memory statistics."""
        return sum(domain.nbytes for domain in self._domains.values())

    # -- lines ---------------------------------------------------------------------------------------------------

    def open(self, groups: Sequence[WeightGroup]) -> None:
        self._alive()
        if self._open:
            raise GTPStateError(
                "the copy-engine transport was opened twice without a close: a bug in gtp, please report it"
            )
        driver, captured = self._driver, bool(self._driver.capture())
        for group in groups:
            self._publish(group)
        domains = list(dict.fromkeys(self._domains[g.process_group] for g in groups))
        current = driver.current_stream()
        for domain in domains:
            domain.restart_turns()
            domain.opened_with = None
            if domain.size > 1:
                domain.opened_with = domain.line(captured)
                driver.submit(domain.opened_with.post, current)
        first = self._pulls[0]
        self._chain(current, first)
        for domain in domains:
            if domain.opened_with is not None:
                driver.submit(domain.opened_with.await_posts, first)
        opened = self._event()
        driver.record(opened, first)
        if captured:
            # A capture may end before the line does, and must have no loose ends. Gathers fork from the current stream.
            driver.wait_event(current, opened)
            self._events.append(opened)
        else:
            for stream in (*self._pulls[1:], self._local):
                driver.wait_event(stream, opened)
            self._opened = opened
        self._open = domains

    def close(self) -> None:
        self._alive()
        driver = self._driver
        current = driver.current_stream()
        if self._opened is not None:
            # Even where nothing was gathered, a peer's next "published" must not come before this one was taken.
            driver.wait_event(current, self._opened)
            self._events.append(self._opened)
            self._opened = None
        lines = [(domain, domain.opened_with) for domain in self._open if domain.opened_with is not None]
        if len(lines) == 1:
            domain, line = lines[0]
            driver.submit(domain.closing(line), current)
        else:
            for _, line in lines:
                driver.submit(line.release, current)
            for _, line in lines:
                driver.submit(line.reclaim, current)
        for domain in self._open:
            domain.opened_with = None
        self._open = []
        if lines and self._watchdog is not None:
            self._watchdog.tick()

    def _publish(self, group: WeightGroup) -> None:
        """A parameter whose storage was re-pointed is published by a copy; others are where they should be."""
        domain = self._domains[group.process_group]
        for member in group.members:
            if member.send.data_ptr() != domain.address(member, domain.rank):
                with torch.no_grad():
                    domain.shard_view(member).copy_(member.send)

    # -- gathers -------------------------------------------------------------------------------------------------

    def start_gather(
        self, group: WeightGroup, out: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event]
    ) -> _Ticket:
        plan, driver = self._gather_plans[group.index], self._driver
        if plan.domain not in self._open:
            raise GTPStateError(f"{group.name}: gathered outside of a line, where peers may be writing their shards")
        addresses = [tensor.data_ptr() for tensor in out]
        waits = self._start_of_gather(driver, after)
        events = []
        for stream, copies in plan.lanes:
            for event in waits:
                driver.wait_event(stream, event)
            for member, offset, source, nbytes in copies:
                driver.copy(addresses[member] + offset, source, nbytes, stream)
            done = self._event()
            driver.record(done, stream)
            events.append(done)
        return _Ticket(events)

    def _start_of_gather(self, driver: Driver, after: Sequence[torch.cuda.Event]) -> list[int]:
        if not driver.capture():
            return [event.cuda_event for event in after]
        # Events from before the capture may not be waited for inside it, and need not be: a capture begins with an idle
        # device. The current stream stands for the others, and brings the side streams into the capture.
        fork = self._event()
        driver.record(fork, driver.current_stream())
        self._events.append(fork)
        return [fork]

    def finish_gather(self, ticket: _Ticket) -> None:
        self._finish(ticket)

    # -- reductions ----------------------------------------------------------------------------------------------

    def start_reduce(
        self,
        group: WeightGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> _Ticket:
        self._alive()
        wire = wgrads[0].dtype
        key = (group.index, wire)
        plan = self._reduce_plans.get(key)
        if plan is None:
            plan = self._reduce_plans[key] = self._plan_reduce(group, wgrads)
        if group.replicate_group is None:
            return self._reduce(plan, wgrads, into, accumulate, divisor)
        return self._reduce_twice(plan, group.replicate_group, wgrads, into, accumulate, divisor)

    def finish_reduce(self, ticket: _Ticket) -> None:
        self._finish(ticket)

    def _reduce(
        self,
        plan: ReducePlan,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
        shared: bool = False,
    ) -> _Ticket:
        """`shared`: every rank gets the whole of every wgrad, instead of the slice that is its own."""
        driver, domain = self._driver, plan.domain
        capture = driver.capture()
        ready, sent = self._event(), self._event()
        driver.record(ready, driver.current_stream())
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
        self._events.append(sent)
        driver.record(ready, self._adds)
        return _Ticket([ready])

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

    def _reduce_twice(
        self,
        plan: ReducePlan,
        replicate_group: dist.ProcessGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> _Ticket:
        """Over the group into fp32, from there over the replicas by their collective, from there into the target."""
        wide = torch.float64 if torch.float64 in (into[0].dtype, wgrads[0].dtype) else torch.float32
        totals = [torch.empty(target.shape, dtype=wide, device=target.device) for target in into]
        ticket = self._reduce(plan, wgrads, totals, [False] * len(into), 1)
        with torch.cuda.stream(torch.cuda.ExternalStream(self._adds, device=self._device)):
            for total in totals:
                dist.all_reduce(total, group=replicate_group)
        alone = self._adder_for(None)
        for total, target, adds_up in zip(totals, into, accumulate, strict=True):
            own = total.data_ptr()
            alone(target, 0, own, own, 0, total.numel(), wide, divisor, adds_up, self._adds)
        self._driver.record(ticket.events[0], self._adds)
        ticket.keep = totals
        return ticket

    def _plan_reduce(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> ReducePlan:
        if any(wgrad.dtype != wgrads[0].dtype for wgrad in wgrads):
            found = ", ".join(sorted({str(wgrad.dtype) for wgrad in wgrads}))
            raise GTPStateError(f"{group.name}: the wgrads of one group must have one dtype, got {found}")
        domain = self._domains[group.process_group]
        return ReducePlan(domain, plan_messages([m.send.numel() for m in group.members], wgrads[0].dtype, domain))

    # -- gradients of replicated parameters ------------------------------------------------------------------------

    def start_all_reduce(self, flat: torch.Tensor, process_groups: Sequence[dist.ProcessGroup]) -> Any:
        known = all(group in self._domains for group in process_groups)
        if not known or not 0 < flat.numel() * flat.element_size() <= FLAT_BYTES:
            return super().start_all_reduce(flat, process_groups)
        # Small: every rank sends all of it to all others, through the mailboxes.
        self._alive()
        tickets: list[_Ticket] = []
        for group in process_groups:
            if tickets:
                self._finish(tickets.pop())
            domain = self._domains[group]
            plan = ReducePlan(domain, plan_messages([flat.numel()], flat.dtype, domain))
            tickets.append(self._reduce(plan, [flat], [flat], [False], 1, shared=True))
        return tickets

    def finish_all_reduce(self, ticket: Any) -> None:
        for each in ticket:
            if isinstance(each, _Ticket):
                self._finish(each)
            else:
                each.wait()

    # -- inside --------------------------------------------------------------------------------------------------

    def _adder_for(self, domain: Domain | None) -> Any:
        rank, size = (0, 1) if domain is None else (domain.rank, domain.size)
        adder = self._adders.get((rank, size))
        if adder is None:
            make = self._adder
            if make is None:
                from gtp.ops.kernels.fused_add import FusedAdd as make
            adder = self._adders[rank, size] = make(rank, size, self._reduce_sms)
        return adder

    def _finish(self, ticket: _Ticket) -> None:
        driver = self._driver
        current = driver.current_stream()
        for event in ticket.events:
            driver.wait_event(current, event)
        self._events.extend(ticket.events)
        ticket.events = []

    def _event(self) -> int:
        return self._events.pop() if self._events else self._driver.new_event()

    def _chain(self, before: int, after: int) -> None:
        event = self._event()
        self._driver.record(event, before)
        self._driver.wait_event(after, event)
        self._events.append(event)

    def _alive(self) -> None:
        if self._watchdog is not None:
            self._watchdog.check()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
        self._alive()

    def shutdown(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

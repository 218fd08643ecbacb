"""`CopyEngineTransport`: peer copies and stream memory operations. No kernel but one addition, no SM but for that.

A gather pulls: every rank reads its peers' shards, which lie in memory mapped by all, between "published" at `open`
and "finished reading" at `close`. No gather waits for anybody. A reduction pushes: every rank copies the slices of its
wgrad that belong to others into their mailboxes, and each owner adds what arrived. So wgrads and what is gathered live
in memory that is this rank's own business (for gathered weights see in_place.py), and all memory that ranks must agree
on is allocated once, in `prepare`.

[Note: no deadlock] Streams that look independent may share a hardware queue, and a graph may put independent branches
in any order. So every wait for a peer is queued behind, and ordered after, everything of this rank that a peer might be
waiting for at that point. Were each rank to run its whole queue strictly in order, all waits would still end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError
from gtp.ops.peer import (
    Arena,
    ArenaFactory,
    CudaDriver,
    CudaPages,
    Driver,
    LocalArena,
    PagedArenaFactory,
    Pages,
    SymmetricArena,
    Watchdog,
    make_paged_arena,
)
from gtp.runtime.copy_plans import GatherPlan, ReducePlan, plan_gather, plan_messages
from gtp.runtime.domain import Domain
from gtp.runtime.events import Events, Ticket
from gtp.runtime.group import Member, WeightGroup
from gtp.runtime.in_place import Place, Room
from gtp.runtime.mail import Mail
from gtp.runtime.transport import Transport

MAILBOX_BYTES = 64 << 20  # at most: the widest slice of the model may need less
MAILBOXES = 2
FLAT_BYTES = 8 << 20  # replicated gradients beyond this go by a collective, which sends less than all to all

_log = logging.getLogger("gtp")

_ADVICE = (
    "all ranks of a GTP group must use the same weights in the same order. GTPConfig(peer_timeout=...) sets the time"
)


class CopyEngineTransport(Transport):
    """See the module's header. For groups inside one NVLink domain; `gtp.ops.peer.why_not` tells.

    Args:
        device: This rank's GPU.
        map_shards: Whether own shards are mapped into gathered weights, where they can be.
        reduce_sms: Upper bound on the SMs that an addition takes.
        peer_timeout: Seconds that a stream may wait for another rank before that rank is reported.
        driver, make_arena, adder, pages: What to run on, for tests: `CudaDriver`, `SymmetricArena`, `FusedAdd`,
            `CudaPages` with `make_paged_arena` otherwise.
    """

    name = "copy_engine"
    peers_read = True

    def __init__(
        self,
        device: torch.device,
        *,
        map_shards: bool = True,
        reduce_sms: int = 44,
        peer_timeout: float = 600.0,
        driver: Driver | None = None,
        make_arena: ArenaFactory | None = None,
        adder: Any = None,
        pages: tuple[Pages, PagedArenaFactory] | None = None,
    ) -> None:
        self._device = device
        self._peer_timeout = peer_timeout
        self._driver: Driver = CudaDriver(device) if driver is None else driver
        self._make_arena = make_arena or self._new_arena
        self._pages = pages if map_shards else None
        if map_shards and pages is None and device.type == "cuda":
            self._pages = CudaPages(device), make_paged_arena
        self._room: Room | None = None
        self._places: list[Place | None] = []
        self._watchdog: Watchdog | None = None
        self._events = Events(self._driver)
        self._domains: dict[dist.ProcessGroup, Domain] = {}
        self._open: list[Domain] = []
        self._opened: int | None = None
        self._opened_in = 0  # the capture of the open line
        self._gather_plans: list[GatherPlan] = []
        self._reduce_plans: dict[tuple[Any, ...], ReducePlan] = {}
        new = self._driver.new_stream
        self._pulls, self._local = (new(), new()), new()
        self._mail = Mail(self._driver, self._events, device, adder, reduce_sms)

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
                send_streams=self._mail.streams,
                watch=None if self._watchdog is None else self._watchdog.site,
                pages=self._pages,
            )
        room = self._room = None if self._pages is None else Room(self._pages[0], self._driver.capture)
        for group in groups:
            domain = self._domains[group.process_group]
            for member in group.members:
                self._move(domain, member)
            own = [(domain.blocks[m], m.send.nbytes) for m in group.members if m in domain.blocks]
            place = Place(room, own, domain.rank, domain.size) if own and room is not None else None
            self._places.append(place)
            self._gather_plans.append(plan_gather(domain, group, self._pulls, self._local, in_place=place is not None))
        self._log_places(groups)
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

    def _log_places(self, groups: Sequence[WeightGroup]) -> None:
        placed = sum(g.gathered_nbytes for g, place in zip(groups, self._places, strict=True) if place is not None)
        total = sum(g.gathered_nbytes for g in groups)
        _log.info(
            "gtp: own shards are mapped into %.1f of %.1f MiB of gathered weights, and copied into the others",
            placed / 2**20, total / 2**20,
        )  # fmt: skip
        for domain in self._domains.values():
            if domain.why_no_pages is not None:
                _log.warning(
                    "gtp: own shards are copied into gathered weights, since they cannot be mapped: %s",
                    domain.why_no_pages,
                )

    def place(self, group: WeightGroup) -> Place | None:
        return self._places[group.index]

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of peer memory on this rank: published shards and mailboxes. Not in torch's memory statistics."""
        return sum(domain.nbytes for domain in self._domains.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory for peers' shards around mapped ones, pooled like other buffers. Not in torch's statistics,
        either."""
        return 0 if self._room is None else self._room.nbytes

    # -- lines ---------------------------------------------------------------------------------------------------

    def open(self, groups: Sequence[WeightGroup]) -> None:
        self._alive()
        if self._open:
            raise GTPStateError(
                "the copy-engine transport was opened twice without a close: a bug in gtp, please report it"
            )
        driver, self._opened_in = self._driver, self._driver.capture()
        captured = bool(self._opened_in)
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
        self._events.chain(current, first)
        for domain in domains:
            if domain.opened_with is not None:
                driver.submit(domain.opened_with.await_posts, first)
        opened = self._events.take()
        driver.record(opened, first)
        if captured:
            # A capture may end before the line does, and must have no loose ends. Gathers fork from the current stream.
            driver.wait_event(current, opened)
            self._events.give(opened)
        else:
            for stream in (*self._pulls[1:], self._local):
                driver.wait_event(stream, opened)
            self._opened = opened
        self._open = domains

    def close(self) -> None:
        self._alive()
        driver = self._driver
        capture = driver.capture()
        if capture != self._opened_in and self._opened_in:
            # Its graph was given up: "published" was never sent, and there is nobody to tell or to wait for.
            self._forget_line()
            return
        if capture != self._opened_in:
            raise GTPStateError(
                "a forward that began outside of a CUDA graph capture would end inside of it: before the capture, run "
                "its backward or call runtime.release()"
            )
        current = driver.current_stream()
        if self._opened is not None:
            # Even where nothing was gathered, a peer's next "published" must not come before this one was taken.
            driver.wait_event(current, self._opened)
            self._events.give(self._opened)
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
        self._forget_line()
        if lines and self._watchdog is not None:
            self._watchdog.tick()

    def _forget_line(self) -> None:
        for domain in self._open:
            domain.opened_with = None
        self._open = []

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
    ) -> Ticket:
        plan, driver = self._gather_plans[group.index], self._driver
        if plan.domain not in self._open:
            raise GTPStateError(f"{group.name}: gathered outside of a line, where peers may be writing their shards")
        addresses = [tensor.data_ptr() for tensor in out]
        # Events from before a capture may not be waited for inside it, and need not be: a capture begins with an idle
        # device. The current stream stands for the others, and brings the side streams into the capture.
        fork = self._events.take() if driver.capture() else None
        if fork is not None:
            driver.record(fork, driver.current_stream())
        waits = [event.cuda_event for event in after] if fork is None else [fork]
        events = []
        for stream, copies in plan.lanes:
            for event in waits:
                driver.wait_event(stream, event)
            for member, offset, source, nbytes in copies:
                driver.copy(addresses[member] + offset, source, nbytes, stream)
            done = self._events.take()
            driver.record(done, stream)
            events.append(done)
        if fork is not None:
            self._events.give(fork)  # not before: a lane would record it anew, and the next lane wait for that
        return Ticket(events)

    def finish_gather(self, ticket: Ticket) -> None:
        self._events.finish(ticket)

    # -- reductions ----------------------------------------------------------------------------------------------

    def start_reduce(
        self,
        group: WeightGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> Ticket:
        self._alive()
        for member, target in zip(group.members, into, strict=True):
            if not target.is_contiguous():  # the addition knows its address only
                raise GTPStateError(
                    f"{member.name}: its gradient would be added into memory with strides {target.stride()}, and the "
                    "copy-engine transport adds into contiguous memory alone. Give the weight a contiguous main_grad"
                )
        key = (group.index, *[wgrad.dtype for wgrad in wgrads])
        plan = self._reduce_plans.get(key)
        if plan is None:
            plan = self._reduce_plans[key] = self._plan_reduce(group, wgrads)
        if group.replicate_group is None:
            return self._mail.reduce(plan, wgrads, into, accumulate, divisor)
        return self._mail.reduce_twice(plan, group.replicate_group, wgrads, into, accumulate, divisor)

    def finish_reduce(self, ticket: Ticket) -> None:
        self._events.finish(ticket)

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
        tickets: list[Ticket] = []
        for group in process_groups:
            if tickets:
                self._events.finish(tickets.pop())
            domain = self._domains[group]
            plan = ReducePlan(domain, plan_messages([flat.numel()], flat.dtype, domain))
            tickets.append(self._mail.reduce(plan, [flat], [flat], [False], 1, shared=True))
        return tickets

    def finish_all_reduce(self, ticket: Any) -> None:
        for each in ticket:
            if isinstance(each, Ticket):
                self._events.finish(each)
            else:
                each.wait()

    # -- inside --------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._watchdog is not None:
            self._watchdog.check()

    def shutdown(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            if self._watchdog.failed:
                return  # waits for a lost rank may never end, and what the current stream does is worthless already
        if self._open and self._driver.capture() == self._opened_in:
            current = self._driver.current_stream()
            for stream in (*self._pulls, self._local, *self._mail.all_streams):
                self._events.chain(stream, current)

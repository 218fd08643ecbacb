"""Raw events of one driver, pooled: recorded, waited for, and recorded anew."""

from __future__ import annotations

import dataclasses
from typing import Any

from gtp.ops.peer import Driver


@dataclasses.dataclass(eq=False, slots=True)
class Ticket:
    """Work on side streams: complete when all events have happened."""

    events: list[int]
    keep: Any = None  # memory that the side streams read or write until then


class Events:
    """Events of a driver. One given back may be recorded again at once: who waits for it has been queued to wait."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._spare: list[int] = []

    def take(self) -> int:
        """An event to record."""
        return self._spare.pop() if self._spare else self._driver.new_event()

    def give(self, event: int) -> None:
        """All its waits are queued."""
        self._spare.append(event)

    def chain(self, before: int, after: int) -> None:
        """Stream `after` waits for what stream `before` has been given so far."""
        event = self.take()
        self._driver.record(event, before)
        self._driver.wait_event(after, event)
        self.give(event)

    def finish(self, ticket: Ticket) -> None:
        """The current stream waits for the ticket's work."""
        driver = self._driver
        current = driver.current_stream()
        for event in ticket.events:
            driver.wait_event(current, event)
        self._spare.extend(ticket.events)
        ticket.events = []

"""What `Schedule` knows of the past: segments with their windows, and the order in which segments follow each other.

Pure Python, no torch. The notes on top of schedule.py say how the parts work together.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

_LINES = 32  # finished segments looked back on to predict the next one
_NEAR = 8  # places looked at per segment after a surprise, ahead and behind each

_END = -1  # stands behind the last token of a segment; no consume has it


class Phase(enum.IntEnum):
    """What a consume is for. `RECOMPUTE` is a forward GEMM inside a backward."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2


class Decision(NamedTuple):
    """What to do about one event, in this order: drop, gather on demand if not `hit`, prefetch, use, and maybe keep.

    Attributes:
        hit: A copy of the consumed group is resident: use it.
        keep: The copy in use stays resident afterwards, whether it was a hit or not.
        prefetch: Groups to start gathering now, in this order: that of their next use.
        drop: Groups whose resident copies end now, before anything else happens.
    """

    hit: bool
    keep: bool
    prefetch: tuple[int, ...]
    drop: tuple[int, ...]


NOTHING: Final = Decision(False, False, (), ())


class Budget(NamedTuple):
    """Bytes of a gathered group by index, and how many may be resident ahead of use and kept for backward."""

    nbytes: tuple[int, ...]
    prefetch: int
    keep: int


def token_of(group: int, phase: int, inside: bool) -> int:
    """One consume as one integer >= 0. Odd: inside of the brackets."""
    return ((group * 3 + phase) << 1) | inside


def consume_of(token: int) -> tuple[int, Phase]:
    """Group and phase of a token."""
    group, phase = divmod(token >> 1, 3)
    return group, Phase(phase)


class Segment:
    """A finished stretch of consumes between two lines, and all that can be said about it in advance.

    Positions count its consumes, those outside of the brackets included.
    """

    __slots__ = ("after", "ends", "first", "intervals", "keeps", "length", "opened", "plan", "tokens", "uses", "where")

    def __init__(self, opened: bool, tokens: Sequence[int]) -> None:
        self.opened = opened  # it began with `open`, which prefetches its first window
        self.tokens = (*tokens, _END)
        self.length = length = len(tokens)
        self.uses = [consume_of(t)[0] if t & 1 else -1 for t in tokens]  # group, or -1 outside of the brackets
        self.after = [length] * (length + 1)  # next position that uses the same group, or `length`
        self.where: dict[int, list[int]] = {}  # positions of each token
        self.intervals: list[tuple[int, int]] = []  # of the kept groups: last use in forward, first in backward
        self.keeps: set[int] = set()  # where those intervals begin
        self.ends: set[int] = set()  # and end
        self.first: tuple[int, ...] = ()  # what `open` prefetches
        self.plan: list[Decision] | None = None
        for position, token in enumerate(tokens):
            self.where.setdefault(token, []).append(position)
        next_use: dict[int, int] = {}
        for position in range(length - 1, -1, -1):
            group = self.uses[position]
            if group >= 0:
                self.after[position] = next_use.get(group, length)
                next_use[group] = position

    def prepare(self, budget: Budget) -> list[Decision]:
        """The decisions along the segment, one per position. Made once, in time linear in `length`."""
        if self.plan is None:
            self._choose_kept(budget)
            self.plan = self._make_plan(budget)
        return self.plan

    def near(self, token: int, position: int) -> list[int]:
        """Where `token` is, ahead of `position` and then behind it, the nearest first; the nearest few only."""
        places = self.where.get(token, [])
        here = bisect_left(places, position)
        return places[here : here + _NEAR] + places[max(here - _NEAR, 0) : here][::-1]

    def _choose_kept(self, budget: Budget) -> None:
        """Of the groups that forward uses last and backward uses again, those that fit, the latest first."""
        if budget.keep == 0:
            return
        tokens = self.tokens[:-1]
        backward = next((i for i, t in enumerate(tokens) if t & 1 and consume_of(t)[1] is not Phase.FORWARD), 0)
        left = budget.keep
        for position in range(backward - 1, -1, -1):
            group, after = self.uses[position], self.after[position]
            if group >= 0 and backward <= after < self.length and budget.nbytes[group] <= left:
                left -= budget.nbytes[group]
                self.intervals.append((position, after))
                self.keeps.add(position)
                self.ends.add(after)

    def _make_plan(self, budget: Budget) -> list[Decision]:
        window = Window(self, budget, 0)
        if self.opened:
            self.first = tuple([self.uses[i] for i in window.extend()])
        plan = []
        for position, group in enumerate(self.uses):
            if group < 0:
                plan.append(NOTHING)
                continue
            hit = group in window
            window.consume(position)
            fresh = [self.uses[i] for i in window.extend()]
            plan.append(Decision(hit, group in window, tuple([g for g in fresh if g != group]), ()))
        return plan


class Window:
    """The groups that are resident between two consumes of a segment. See [Note: resident is where we are].

    `paid` groups are used again before `_stop` and count against the prefetch budget. `kept` ones wait for their first
    use in backward and count against the keep budget. A group is in both when a use after that one is near as well.
    """

    __slots__ = ("_budget", "_bytes", "_segment", "_stop", "kept", "paid")

    def __init__(self, segment: Segment, budget: Budget, position: int) -> None:
        """The window in front of `position`, before `extend`. `segment` is prepared."""
        self._segment = segment
        self._budget = budget
        self._bytes = 0
        self._stop = position
        self.paid: set[int] = set()
        self.kept = {segment.uses[start] for start, end in segment.intervals if start < position <= end}

    def __contains__(self, group: int) -> bool:
        return group in self.paid or group in self.kept

    def consume(self, position: int) -> None:
        """The cursor moves past the consume at `position`."""
        segment = self._segment
        group, after = segment.uses[position], segment.after[position]
        self._stop = max(self._stop, position + 1)
        self.kept.discard(group)
        if position in segment.keeps:
            self.kept.add(group)
            after = segment.after[after]  # the use that ends the interval costs the window nothing
        if after >= self._stop and group in self.paid:
            self.paid.remove(group)
            self._bytes -= self._budget.nbytes[group]

    def extend(self) -> list[int]:
        """Looks ahead as far as the budget allows. Returns the positions whose groups came in, in order."""
        segment, (nbytes, limit, _) = self._segment, self._budget
        came = []
        while self._stop < segment.length:
            group = segment.uses[self._stop]
            if group >= 0 and group not in self.paid and not (group in self.kept and self._stop in segment.ends):
                size = nbytes[group]
                if limit == 0 or (size > 0 and self._bytes > 0 and self._bytes + size > limit):
                    break
                self._bytes += size
                self.paid.add(group)
                if group not in self.kept:
                    came.append(self._stop)
            self._stop += 1
        return came


class Succession:
    """Predicts which segment follows the finished ones: what came after the longest equal past, the most often.

    For each lag it counts for how many segments in a row the past has repeated itself with that lag. So any rhythm of
    at most `_LINES` segments (accumulation, an evaluation every few steps, two forwards and two backwards) is found.
    """

    __slots__ = ("_past", "_runs")

    def __init__(self) -> None:
        self._past: list[int] = []
        self._runs = [0] * (_LINES + 1)

    def append(self, name: int) -> None:
        """The segment called `name` has finished."""
        past, runs = self._past, self._runs
        for lag in range(1, len(past) + 1):
            runs[lag] = runs[lag] + 1 if past[-lag] == name else 0
        past.append(name)
        del past[:-_LINES]

    def expected(self, names: Collection[int]) -> int | None:
        """The best guess among `names`, at equal votes the most recent one; `None` if none was seen lately."""
        longest, votes = 0, dict[int, int]()
        for lag in range(1, len(self._past) + 1):
            name, run = self._past[-lag], self._runs[lag]
            if name in names and run >= longest:
                if run > longest:
                    longest, votes = run, {}
                votes[name] = votes.get(name, 0) + 1
        return max(votes, key=lambda name: votes[name], default=None)

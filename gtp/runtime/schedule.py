"""`Schedule`: predicts the next consumes from those it saw, and says what to gather ahead, keep and drop. No torch.

[Note: a guess, never an answer] The schedule decides when a weight group is gathered, never what a GEMM reads. `hit`
is said only where, by these books, a copy of exactly that group is resident, and everything else is gathered on demand.
So a wrong prediction costs a late gather, and tied weights, repeated layers, branches, evaluation, accumulation,
interleaved pipelines and recompute are not cases of their own.

[Note: every rank decides alike] Decisions are a function of the sequence of calls and of nothing else: no time, no ids,
no order of a hash table. Sets are asked for membership only, and what is iterated holds the order of insertion.

[Note: segments] Lines (`open`, `close`) cut the consumes into segments. The last distinct ones are stored, each once,
however often it repeats, and a cursor follows one of them. At a consume that differs, the cursor moves to the stored
place whose past is most like ours: a branch taken otherwise costs its own late gather and not the rest of the step. A
consume that was never seen moves nothing; the copies that wait go on waiting for what comes after it.

[Note: resident is where we are] While a segment is followed, the resident groups are those of `Window` at the cursor,
however it came there: the groups used next, as many as fit `prefetch_bytes` and at least one, and the groups kept from
the end of forward for backward, up to `keep_bytes`. So the decisions along a segment are made once, when it is first
followed, and the steady state is a look into a list. Windows never reach across a line: at a line everything ends, and
only `open` prefetches. A stretch that begins without `open` therefore gathers its first group late.

Resident bytes after any event are at most max(prefetch_bytes, largest group) + keep_bytes, without the first term when
`prefetch_bytes` is 0. During a consume, the group in use comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gtp.errors import GTPValueError
from gtp.runtime.segments import (
    NOTHING,
    Budget,
    Decision,
    Phase,
    Segment,
    Succession,
    Window,
    consume_of,
    token_of,
)

__all__ = ["Counters", "Decision", "Phase", "Schedule"]

# Bounds on what is remembered. Beyond them guesses get worse and answers stay right.
_SEGMENTS = 16  # distinct segments
_SEGMENT_CONSUMES = 1 << 16  # consumes of one segment; a longer one is not learned
_TOTAL_CONSUMES = 1 << 17  # consumes of all stored segments together
_CONTEXT = 8  # consumes of the past that are compared to find our place

_TOO_LONG = -1  # name of every segment that was too long to be learned


class Counters(NamedTuple):
    """Totals since the schedule was made.

    Attributes:
        consumes: Calls of `consume`.
        hits: Consumes that found a resident copy.
        misses: Consumes that had to gather on demand.
        wrong_guesses: Prefetched copies that were dropped without a use.
        kept: Consumes that left their copy resident.
    """

    consumes: int
    hits: int
    misses: int
    wrong_guesses: int
    kept: int


class Schedule:
    """A state machine: consumes and lines go in, decisions come out. The notes above are its contract.

    Args:
        nbytes: Bytes of a gathered weight group, by group index. Groups go by that index everywhere.
        prefetch_bytes: Bytes of copies that may be resident ahead of their use. One copy may, however large, unless
            this is 0. `None`: four times the mean group.
        keep_bytes: Bytes of copies that may stay from the end of forward to their first use in backward, on top.

    Raises:
        GTPValueError: a size or a budget is negative.
    """

    def __init__(self, nbytes: Sequence[int], *, prefetch_bytes: int | None, keep_bytes: int) -> None:
        sizes = tuple(nbytes)
        if prefetch_bytes is None:
            prefetch_bytes = 4 * sum(sizes) // max(len(sizes), 1)
        given = [("prefetch_bytes", prefetch_bytes), ("keep_bytes", keep_bytes)]
        for name, value in given + [(f"nbytes[{i}]", size) for i, size in enumerate(sizes)]:
            if value < 0:
                raise GTPValueError(f"Schedule: {name} must be a number of bytes >= 0, got {value}")
        self._budget = Budget(sizes, prefetch_bytes, keep_bytes)
        self._stored: dict[int, Segment] = {}  # by name, the least recently finished first
        self._next_name = 0
        self._succession = Succession()
        self._last: Sequence[int] = ()  # tokens of the last finished stretch
        # Where we are: in front of `_position` of `_segment`, which is followed while `_plan` is set. Else it is where
        # we left it. `_record` holds the stretch so far; None says that it is the segment up to the position.
        self._opened = False
        self._segment: Segment | None = None
        self._position = 0
        self._plan: list[Decision] | None = None
        self._record: list[int] | None = []
        self._too_long = False
        # The resident groups, each with whether it was used since it was gathered, and the totals, in front of
        # `_settled`. What the plan said between there and `_position` is added by `_settle`.
        self._resident: dict[int, bool] = {}
        self._settled = 0
        self._joined = 0  # the position behind the last consume that the plan did not decide alone
        self._joined_by_hit = -1  # its group, if it was a hit
        self._consumes = self._hits = self._wrong_guesses = self._kept = 0

    # -- events ----------------------------------------------------------------------------------------------------

    def consume(self, group: int, phase: Phase, *, inside: bool = True) -> Decision:
        """One use of a group by one GEMM.

        Args:
            group: Index into `nbytes`.
            phase: What for.
            inside: False for a use outside of every forward of the root and every backward. It is remembered, and
                otherwise touches nothing: no hit, no prefetch, no drop.

        Raises:
            GTPValueError: there is no such group.
        """
        plan = self._plan
        token = token_of(group, phase, inside)
        if plan is not None:
            position = self._position
            if self._segment.tokens[position] == token:  # type: ignore[union-attr]  # set with the plan
                self._position = position + 1
                if self._record is not None:
                    self._record.append(token)
                return plan[position]
        return self._surprise(group, token)

    def open(self) -> Decision:
        """A line: a forward of the root begins. All copies end; the first groups of the next stretch are prefetched."""
        dropped = self._end_stretch(opened=True)
        segment = self._expected()
        if segment is None:
            return NOTHING._replace(drop=dropped)
        self._plan = segment.prepare(self._budget)
        self._segment, self._record = segment, None
        self._resident = dict.fromkeys(segment.first, False)
        return Decision(False, False, segment.first, dropped)

    def close(self) -> Decision:
        """A line: a backward, or a forward without one, has ended. All copies end, nothing is prefetched."""
        return NOTHING._replace(drop=self._end_stretch(opened=False))

    def forget(self, group: int) -> None:
        """The runtime found the copy of `group` stale or lost.

        If the last decision called it a hit, that becomes a miss, the group is gathered on demand, and what the
        decision said about keeping holds for the new copy. Otherwise the group is no longer resident.
        """
        hit = self._last_hit()
        self._settle()
        if group == hit:
            self._hits -= 1
            self._joined, self._joined_by_hit = self._position, -1
        elif self._resident.pop(group, None) is not None:
            # What is resident is no longer what the plan takes for granted. The next consume finds back.
            self._plan, self._joined_by_hit = None, hit

    def reset(self) -> tuple[int, ...]:
        """An exception or a release cut the stretch short: its start is not learned, and what was learned stays.

        Returns:
            The resident groups, whose copies end now.
        """
        self._settle()
        return self._begin(opened=False)

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def trace(self) -> list[tuple[int, Phase]]:
        """(group, phase) of each consume since the last line, or of the stretch before if there was none yet.

        Of a stretch longer than 65536 consumes only the last ones are known.
        """
        return [consume_of(token) for token in self._so_far() or self._last]

    @property
    def counters(self) -> Counters:
        """Totals up to now."""
        self._settle()
        misses = self._consumes - self._hits
        return Counters(self._consumes, self._hits, misses, self._wrong_guesses, self._kept)

    @property
    def resident(self) -> tuple[int, ...]:
        """The groups that have a copy now, by this schedule's books."""
        self._settle()
        return tuple(self._resident)

    # -- a consume that is not the expected one --------------------------------------------------------------------

    def _surprise(self, group: int, token: int) -> Decision:
        if not 0 <= group < len(self._budget.nbytes):
            raise GTPValueError(f"Schedule: group must be in 0..{len(self._budget.nbytes) - 1}, got {group}")
        self._settle()
        self._consumes += 1
        if not token & 1:
            self._remember(token)
            return NOTHING
        hit = group in self._resident
        self._hits += hit
        self._joined_by_hit = group if hit else -1
        twin = self._twin(token)
        if twin is not None:
            self._segment, self._position, self._record = twin, self._position + 1, None
            return self._follow(group, hit)
        place = self._similar(token)
        self._remember(token)
        if place is not None:
            self._segment, self._position = place
            return self._follow(group, hit)
        self._plan = None
        self._resident.pop(group, None)
        return Decision(hit, False, (), ())

    def _twin(self, token: int) -> Segment | None:
        """A segment that begins with this stretch so far and goes on with `token`."""
        if self._record:
            return None  # this stretch has differed from all of them before
        wanted = (*self._so_far(), token)
        likely = self._expected() if len(wanted) == 1 else None
        for segment in [*([likely] if likely else []), *reversed(self._stored.values())]:
            if segment.tokens[: len(wanted)] == wanted:
                return segment
        return None

    def _similar(self, token: int) -> tuple[Segment, int] | None:
        """The place behind a stored `token` whose past resembles ours the most.

        At equal length of the common past, a place ahead in the segment that was followed goes first, then the segment
        that finished last.
        """
        recent = tuple(self._so_far()[-_CONTEXT:])
        best, longest = None, -1
        first = [self._segment] if self._segment is not None else []
        for segment in [*first, *reversed(self._stored.values())]:
            for position in segment.near(token, self._position):
                common = _common_end(recent, segment.tokens[max(position - _CONTEXT, 0) : position])
                if common > longest:
                    best, longest = (segment, position + 1), common
                    if common == len(recent):
                        return best
        return best

    def _follow(self, group: int, hit: bool) -> Decision:
        """The cursor has moved to another place just behind a consume of `group`: makes the right groups resident."""
        segment, position, resident = self._segment, self._position, self._resident
        assert segment is not None
        plan = segment.prepare(self._budget)
        window = Window(segment, self._budget, position)
        came = window.extend()
        drop = tuple([g for g in resident if g not in window and g != group])
        for dropped in drop:
            self._wrong_guesses += not resident.pop(dropped)
        kept = [end for start, end in segment.intervals if start < position <= end]
        uses = [segment.uses[i] for i in sorted(came + kept)]
        prefetch = tuple([g for g in uses if g not in resident and g != group])
        keep = group in window
        if keep:
            resident[group] = True
            self._kept += 1
        else:
            resident.pop(group, None)
        self._settled = self._joined = position
        if prefetch and self._budget.prefetch == 0:
            # Copies to be kept that nobody kept may not be prefetched now: no plan until their uses are behind us.
            self._plan = None
            return Decision(hit, keep, (), drop)
        self._plan = plan
        resident.update(dict.fromkeys(prefetch, False))
        return Decision(hit, keep, prefetch, drop)

    # -- books -----------------------------------------------------------------------------------------------------

    def _so_far(self) -> Sequence[int]:
        """Tokens since the last line."""
        if self._record is not None:
            return self._record
        assert self._segment is not None
        return self._segment.tokens[: self._position]

    def _remember(self, token: int) -> None:
        record = self._record = list(self._so_far()) if self._record is None else self._record
        record.append(token)
        if len(record) > _SEGMENT_CONSUMES:
            self._too_long = True
            del record[: len(record) - _SEGMENT_CONSUMES // 2]

    def _settle(self) -> None:
        """Writes into the books what the plan said since the last time."""
        plan, segment, resident = self._plan, self._segment, self._resident
        if plan is None or segment is None:
            return
        self._consumes += self._position - self._settled
        for position in range(self._settled, self._position):
            decision, group = plan[position], segment.uses[position]
            if group < 0:
                continue
            self._hits += decision.hit
            if decision.keep:
                self._kept += 1
                resident[group] = True
            else:
                resident.pop(group, None)
            for fresh in decision.prefetch:
                resident[fresh] = False
        self._settled = self._position

    def _last_hit(self) -> int:
        """The group of the last consume if that was a hit, else -1."""
        if self._plan is None or self._segment is None or self._position == self._joined:
            return self._joined_by_hit
        before = self._position - 1
        return self._segment.uses[before] if self._plan[before].hit else -1

    # -- lines -----------------------------------------------------------------------------------------------------

    def _end_stretch(self, opened: bool) -> tuple[int, ...]:
        self._settle()
        tokens = tuple(self._so_far())
        if tokens:
            self._last = tokens
            self._succession.append(_TOO_LONG if self._too_long else self._store(tokens))
        return self._begin(opened)

    def _begin(self, opened: bool) -> tuple[int, ...]:
        """Starts an empty stretch with nothing resident. Returns the groups that were."""
        dropped = tuple(self._resident)
        self._wrong_guesses += sum([not used for used in self._resident.values()])
        self._resident = {}
        self._opened = opened
        self._segment, self._plan, self._record, self._too_long = None, None, [], False
        self._position = self._settled = self._joined = 0
        self._joined_by_hit = -1
        return dropped

    def _store(self, tokens: tuple[int, ...]) -> int:
        """The name of the segment, which becomes the most recent one."""
        for name, segment in self._stored.items():
            if segment.opened == self._opened and segment.length == len(tokens) and segment.tokens[:-1] == tokens:
                self._stored[name] = self._stored.pop(name)
                return name
        name, self._next_name = self._next_name, self._next_name + 1
        self._stored[name] = Segment(self._opened, tokens)
        total = sum([s.length for s in self._stored.values()])
        while len(self._stored) > _SEGMENTS or total > _TOTAL_CONSUMES:
            total -= self._stored.pop(next(iter(self._stored))).length
        return name

    def _expected(self) -> Segment | None:
        """The segment that probably comes next, among those that begin as this stretch did."""
        names = [name for name, segment in self._stored.items() if segment.opened == self._opened]
        name = self._succession.expected(names)
        if name is None:
            name = names[-1] if names else None
        return None if name is None else self._stored[name]


def _common_end(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the last elements are equal."""
    count = 0
    for one, other in zip(reversed(left), reversed(right), strict=False):
        if one != other:
            break
        count += 1
    return count

"""Random programs for the schedule: lists of events, as models, trainers and mishaps would produce them.

An event is ("open",), ("close",), ("use", group, phase, inside), ("forget", group), ("stale",) or ("reset",).
`stale` says: if the last decision was a hit, the copy turns out to be stale.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from hypothesis import strategies as st

from gtp.runtime.schedule import Decision, Phase, Schedule

Event = tuple[object, ...]
# A model: ("use", group), ("repeat", times, model), ("either", model, model) or ("chain", [models])
Model = tuple[object, ...]


def models(groups: int) -> st.SearchStrategy[Model]:
    use = st.tuples(st.just("use"), st.integers(0, groups - 1))
    return st.recursive(
        use,
        lambda inner: st.one_of(
            st.tuples(st.just("repeat"), st.integers(1, 4), inner),
            st.tuples(st.just("either"), inner, inner),
            st.tuples(st.just("chain"), st.lists(inner, min_size=1, max_size=5)),
        ),
        max_leaves=12,
    )


def forward(model: Model, choices: random.Random) -> list[int]:
    """The groups that one forward of `model` uses."""
    kind = model[0]
    if kind == "use":
        return [model[1]]  # type: ignore[list-item]
    if kind == "repeat":
        return [g for _ in range(model[1]) for g in forward(model[2], choices)]  # type: ignore[call-overload,arg-type]
    if kind == "either":
        return forward(model[1 + choices.randrange(2)], choices)  # type: ignore[arg-type]
    return [g for part in model[1] for g in forward(part, choices)]  # type: ignore[attr-defined]


def uses(groups: Iterable[int], phase: Phase, inside: bool = True) -> list[Event]:
    return [("use", group, phase, inside) for group in groups]


def backward(groups: list[int], recompute: bool, frozen: int) -> list[Event]:
    """Backward in reverse; `recompute` runs each group again just before; group `frozen` needs none (-1: all do)."""
    events: list[Event] = []
    for group in reversed(groups):
        if recompute:
            events += uses([group], Phase.RECOMPUTE)
        if group != frozen:
            events += uses([group], Phase.BACKWARD)
    return events


KINDS = ["train", "recompute", "frozen", "evaluate", "alone", "by hand", "two and two", "scored"]
MISHAPS = ["raised", "reset", "stale", "lost"]


def step(kind: str, model: Model, choices: random.Random, groups: int) -> list[Event]:
    """One step of a training script, or something that may go wrong in it."""
    seen = forward(model, choices)
    run = [("open",), *uses(seen, Phase.FORWARD)]
    back = backward(seen, recompute=kind == "recompute", frozen=seen[0] if kind == "frozen" else -1)
    if kind in ("train", "recompute", "frozen"):
        return [*run, *back, ("close",)]
    if kind == "evaluate":
        return [*run, ("close",)]
    if kind == "alone":  # a submodule called by hand, outside of everything
        return uses(seen[:3], Phase.FORWARD, inside=False)
    if kind == "by hand":  # the same between a forward and its backward
        return [*run, *uses(seen[:2], Phase.FORWARD, inside=False), *back, ("close",)]
    if kind == "two and two":
        other = forward(model, choices)
        again = [("open",), *uses(other, Phase.FORWARD), *backward(other, False, -1), ("close",)]
        return [*run, *again, *back, ("close",)]
    if kind == "scored":  # a forward whose graph is thrown away
        return run
    place = choices.randrange(len(run) + 1)
    if kind == "raised":
        return run[:place]
    if kind == "reset":
        return [*run[:place], ("reset",), *back[: choices.randrange(len(back) + 1)], ("reset",)]
    upset: Event = ("stale",) if kind == "stale" else ("forget", choices.randrange(groups))
    whole = [*run, *back, ("close",)]
    place = choices.randrange(1, len(whole))
    return [*whole[:place], upset, *whole[place:]]


class Residency:
    """Carries decisions out on a model of memory, as the runtime does on the GPU, and checks each of them."""

    def __init__(self, nbytes: list[int], prefetch: int, keep: int, schedule: Schedule) -> None:
        self.nbytes = nbytes
        self.schedule = schedule
        self.copies: dict[int, bool] = {}  # resident group: used since it was gathered
        self.bound = (max(prefetch, *nbytes) if prefetch else 0) + keep
        self.prefetch = prefetch
        self.last = (-1, False)  # group and hit of the last consume
        self.hits = self.misses = self.unused = self.kept = 0
        self.late: list[bool] = []  # per inside consume since the last line: whether it missed

    def run(self, event: Event) -> Decision | None:
        """Feeds one event to the schedule and does what it says."""
        decision = self._feed(event)
        if self.schedule.resident != tuple(self.copies):
            assert sorted(self.schedule.resident) == sorted(self.copies)
        assert sum(self.nbytes[g] for g in self.copies) <= self.bound
        counters = self.schedule.counters
        assert counters == (self.hits + self.misses, self.hits, self.misses, self.unused, self.kept)
        return decision

    def _feed(self, event: Event) -> Decision | None:
        schedule = self.schedule
        if event[0] in ("open", "close"):
            decision = schedule.open() if event[0] == "open" else schedule.close()
            self._drop(decision.drop)
            assert not self.copies, "something is resident across a line"
            assert not decision.hit
            assert not decision.keep
            assert event[0] == "open" or not decision.prefetch
            self._gather(decision.prefetch)
            self.last = (-1, False)
            self.late = []
            return decision
        if event[0] == "use":
            return self._use(*event[1:])  # type: ignore[arg-type]
        if event[0] == "reset":
            self._drop(schedule.reset())
            assert not self.copies
            self.last = (-1, False)
            self.late = []
        elif event[0] == "stale" and self.last[1]:
            schedule.forget(self.last[0])
            self.hits, self.misses = self.hits - 1, self.misses + 1
            self.last = (-1, False)
        elif event[0] == "forget" and event[1] != self.last[0]:
            self.copies.pop(event[1], None)  # type: ignore[call-overload]
            schedule.forget(event[1])  # type: ignore[arg-type]
        return None

    def _use(self, group: int, phase: Phase, inside: bool) -> Decision:
        decision = self.schedule.consume(group, phase, inside=inside)
        self.last = (group, decision.hit)
        self.hits += decision.hit
        self.misses += not decision.hit
        self.kept += decision.keep
        if not inside:
            assert decision == (False, False, (), ())
            return decision
        self.late.append(not decision.hit)
        self._drop(decision.drop)
        # a hit is resident, and what is resident is used: the schedule never gathers what it has
        assert decision.hit == (group in self.copies)
        self.copies[group] = True
        self._gather(decision.prefetch)
        assert sum(self.nbytes[g] for g in self.copies) <= self.bound + self.nbytes[group]
        if not decision.keep:
            del self.copies[group]
        return decision

    def _gather(self, groups: Iterable[int]) -> None:
        for group in groups:
            assert group not in self.copies, "gathered twice"
            assert self.prefetch > 0
            self.copies[group] = False

    def _drop(self, groups: Iterable[int]) -> None:
        for group in groups:
            self.unused += not self.copies.pop(group)


def long_run(seed: int) -> str:
    """A digest of the decisions on a long random program. A function of `seed` alone, in any process."""
    choices = random.Random(seed)
    groups = 40
    schedule = Schedule([choices.randrange(1, 100) for _ in range(groups)], prefetch_bytes=150, keep_bytes=120)
    part = ("chain", [("either", ("use", choices.randrange(groups)), ("use", i)) for i in range(groups)])
    model: Model = ("chain", [part, ("repeat", 2, part)])
    digest = hashlib.sha256()
    for _ in range(30):
        for event in step(choices.choice(KINDS), model, choices, groups):
            if event[0] == "use":
                decision = schedule.consume(event[1], event[2], inside=event[3])  # type: ignore[arg-type]
            else:
                decision = schedule.open() if event[0] == "open" else schedule.close()
            digest.update(repr(decision).encode())
    digest.update(repr(schedule.counters).encode())
    return digest.hexdigest()

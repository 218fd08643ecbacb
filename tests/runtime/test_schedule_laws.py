"""Laws of the schedule, on random programs: whatever happens, its books are right and its bounds hold.

`programs.py` beside this makes the programs and carries the decisions out on a model of memory that checks each one.
One law: `pytest tests/runtime/test_schedule_laws.py -k alike`. A few seconds together.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp.runtime.schedule import Phase, Schedule
from tests.runtime.programs import KINDS, MISHAPS, Event, Residency, forward, long_run, models, step, uses

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], int, int, list[Event]]:
    """Group sizes, both budgets, and a program with mishaps."""
    nbytes = draw(sizes)
    prefetch, keep = draw(st.sampled_from([0, 1, 40, 100, 400])), draw(st.sampled_from([0, 30, 100]))
    model = draw(models(len(nbytes)))
    kinds = draw(st.lists(st.sampled_from([*KINDS, *KINDS, *MISHAPS]), min_size=1, max_size=12))
    choices = random.Random(draw(st.integers(0, 1 << 16)))
    return nbytes, prefetch, keep, [event for kind in kinds for event in step(kind, model, choices, len(nbytes))]


@settings(deadline=None, max_examples=200)
@given(situations())
def test_books_and_bounds_hold_after_every_event(situation: tuple[list[int], int, int, list[Event]]) -> None:
    nbytes, prefetch, keep, events = situation
    schedule = Schedule(nbytes, prefetch_bytes=prefetch, keep_bytes=keep)
    residency = Residency(nbytes, prefetch, keep, schedule)
    stretch: list[tuple[int, Phase]] = []
    for event in events:
        residency.run(event)
        if event[0] in ("open", "close", "reset"):
            stretch = []
        elif event[0] == "use":
            stretch.append((event[1], event[2]))  # type: ignore[arg-type]
            assert schedule.trace == stretch


@settings(deadline=None, max_examples=100)
@given(
    nbytes=sizes,
    events=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["open", "close", "reset", "stale"])),
            st.tuples(st.just("use"), st.integers(0, 7), st.sampled_from(Phase), st.sampled_from([True] * 5 + [False])),
            st.tuples(st.just("forget"), st.integers(0, 7)),
        ),
        max_size=60,
    ),
    prefetch=st.sampled_from([0, 1, 40, 100]),
    keep=st.sampled_from([0, 60]),
)
def test_books_and_bounds_hold_without_rhyme_or_reason(
    nbytes: list[int], events: list[Event], prefetch: int, keep: int
) -> None:
    residency = Residency(nbytes, prefetch, keep, Schedule(nbytes, prefetch_bytes=prefetch, keep_bytes=keep))
    for event in events * 3:
        if len(event) > 1:
            event = (event[0], event[1] % len(nbytes), *event[2:])  # type: ignore[operator]
        residency.run(event)


@settings(deadline=None, max_examples=150)
@given(situations(), st.randoms(use_true_random=False))
def test_two_schedules_decide_alike_whoever_looks_at_them(
    situation: tuple[list[int], int, int, list[Event]], choices: random.Random
) -> None:
    nbytes, prefetch, keep, events = situation
    ours, theirs = (Schedule(nbytes, prefetch_bytes=prefetch, keep_bytes=keep) for _ in range(2))
    for event in events:
        if choices.random() < 0.3:  # reading is no event
            assert theirs.counters.consumes >= theirs.counters.hits
            assert len(theirs.resident) <= len(nbytes)
            assert len(theirs.trace) >= 0
        if event[0] == "use":
            group, phase, inside = event[1:]
            assert ours.consume(group, phase, inside=inside) == theirs.consume(group, phase, inside=inside)  # type: ignore[arg-type]
        elif event[0] == "forget":
            ours.forget(event[1])  # type: ignore[arg-type]
            theirs.forget(event[1])  # type: ignore[arg-type]
        elif event[0] != "stale":
            assert getattr(ours, event[0])() == getattr(theirs, event[0])()  # type: ignore[call-overload]
    assert ours.counters == theirs.counters
    assert ours.resident == theirs.resident


def test_processes_with_other_hash_seeds_decide_alike() -> None:
    # The child reaches the schedule past `gtp/__init__`, which imports torch; the schedule itself must not.
    program = (
        "import importlib.machinery, sys, types\n"
        "package = types.ModuleType('gtp'); package.__path__ = ['gtp']; sys.modules['gtp'] = package\n"
        "from tests.runtime.programs import long_run\n"
        "assert 'torch' not in sys.modules\n"
        "print(long_run(7), hash('gtp'))\n"
    )
    printed = []
    for seed in ("0", "1", "2"):
        child = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        printed.append(child.stdout.split())
    assert [digest for digest, _ in printed] == [long_run(7)] * 3
    assert len({hashed for _, hashed in printed}) == 3, "the children did hash alike: this test proves nothing"


@settings(deadline=None, max_examples=150)
@given(
    nbytes=sizes,
    prefetch=st.sampled_from([1, 40, 100]),
    keep=st.sampled_from([0, 60]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_periodic_program_hits_always_from_its_third_period_on(
    nbytes: list[int], prefetch: int, keep: int, kinds: list[str], data: st.DataObject
) -> None:
    choices = random.Random(data.draw(st.integers(0, 1 << 16)))
    model = data.draw(models(len(nbytes)))
    period = [event for kind in kinds for event in step(kind, model, choices, len(nbytes))]
    residency = Residency(nbytes, prefetch, keep, Schedule(nbytes, prefetch_bytes=prefetch, keep_bytes=keep))
    opened = False
    for count in range(6):
        for event in period:
            before = residency.unused
            residency.run(event)
            opened = event[0] == "open" or (opened and event[0] != "close")
            if count >= 3:
                # only a stretch that no forward opened gathers its first group late: nothing crosses a line
                assert residency.late in ([], [not opened, *[False] * (len(residency.late) - 1)])
                assert residency.unused == before


@pytest.mark.parametrize("branches", [0, 8])
def test_nothing_grows_over_200_steps(branches: int) -> None:
    schedule = Schedule([1] * 48, prefetch_bytes=4, keep_bytes=2)
    fork = [("either", ("use", 2 * i), ("use", 2 * i + 1)) for i in range(branches)]
    model = ("chain", [*fork, *[("use", i) for i in range(16, 48)]])
    choices = random.Random(3)
    sizes = []
    for number in range(200):
        for event in step("train", model, choices, 48):
            if event[0] == "use":
                schedule.consume(event[1], event[2])  # type: ignore[arg-type]
            else:
                getattr(schedule, event[0])()  # type: ignore[call-overload]
        if number % 4 == 0:
            sizes.append(entries(schedule))
    if branches == 0:
        assert sizes[10:] == [sizes[10]] * 40
    else:
        # 2**8 ways through the model: the store is full after a while, and stays so
        assert max(sizes) <= 1.1 * sizes[10]
        assert max(sizes) <= 16 * (2 * 40) * 12


def test_a_store_of_long_segments_is_bounded_in_total() -> None:
    schedule = Schedule([1] * 10, prefetch_bytes=2, keep_bytes=0)
    for length in range(20_000, 20_010):
        schedule.open()
        for i in range(length):
            schedule.consume(i % 10, Phase.FORWARD)
        schedule.close()
    assert sum(segment.length for segment in schedule._stored.values()) <= 1 << 17
    assert len(schedule._stored) == 6


def entries(thing: object, seen: set[int] | None = None) -> int:
    """Elements of all containers that hang off `thing`, each object once."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (int, str, bool, type(None))):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(entries(x, seen) for pair in thing.items() for x in pair)
    if isinstance(thing, (list, tuple, set)):
        return len(thing) + sum(entries(x, seen) for x in thing)
    slots = getattr(type(thing), "__slots__", ())
    return entries(getattr(thing, "__dict__", {}), seen) + sum(entries(getattr(thing, s), seen) for s in slots)


def test_random_branches_cost_about_their_own_gathers() -> None:
    # Ten forks, both ways equally often: half of them go otherwise than last time, forward and backward. A fork costs
    # a late gather each way at most; the 20 other consumes of a step always hit.
    groups, forks = 30, 10
    schedule = Schedule([1] * groups, prefetch_bytes=3, keep_bytes=0)
    choices = random.Random(11)
    model = (
        "chain",
        [part for i in range(forks) for part in (("use", 3 * i), ("either", ("use", 3 * i + 1), ("use", 3 * i + 2)))],
    )
    trunk_misses = fork_misses = 0
    for count in range(120):
        seen = forward(model, choices)
        schedule.open()
        for group, phase in [*((g, Phase.FORWARD) for g in seen), *((g, Phase.BACKWARD) for g in reversed(seen))]:
            hit = schedule.consume(group, phase).hit
            if count >= 20:
                trunk_misses += not hit and group % 3 == 0
                fork_misses += not hit and group % 3 != 0
        schedule.close()
    assert trunk_misses == 0
    assert fork_misses <= 100 * forks  # of 2 * forks a step


def test_layers_dropped_at_random_cost_no_late_gather() -> None:
    # Stochastic depth. With two groups ahead, the one after a skipped layer is there already.
    schedule = Schedule([1] * 32, prefetch_bytes=3, keep_bytes=0)
    choices = random.Random(5)
    misses = []
    for _ in range(60):
        seen = [0] + [g for g in range(1, 32) if g % 2 == 0 or choices.random() < 0.9]
        before = schedule.counters.misses
        schedule.open()
        for event in [*uses(seen, Phase.FORWARD), *uses(reversed(seen), Phase.BACKWARD)]:
            schedule.consume(event[1], event[2])  # type: ignore[arg-type]
        schedule.close()
        misses.append(schedule.counters.misses - before)
    # A layer that was skipped in the segment being followed and is not now comes late, once each way.
    assert sum(misses[20:]) / 40 <= 4

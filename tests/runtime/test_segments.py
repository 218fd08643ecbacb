"""Windows and successions on their own: the facts that the schedule's plans rest on. No torch in it, no ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gtp.runtime.segments import Budget, Phase, Segment, Succession, Window, consume_of, token_of

consumes = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(Phase), st.sampled_from([True] * 6 + [False])), max_size=40
)
budgets = st.builds(
    Budget,
    st.tuples(*[st.integers(0, 30)] * 6),
    st.sampled_from([0, 1, 20, 50, 200]),
    st.sampled_from([0, 20, 60]),
)


def segment_of(opened: bool, uses: list[tuple[int, Phase, bool]]) -> Segment:
    return Segment(opened, [token_of(*use) for use in uses])


@given(st.integers(0, 1 << 20), st.sampled_from(Phase), st.booleans())
def test_a_token_is_one_consume(group: int, phase: Phase, inside: bool) -> None:
    token = token_of(group, phase, inside)
    assert token >= 0
    assert consume_of(token) == (group, phase)
    assert token & 1 == inside


@settings(deadline=None, max_examples=200)
@given(consumes, budgets)
@example(
    [(0, Phase.FORWARD, True), (1, Phase.FORWARD, True), (0, Phase.FORWARD, True)], Budget((0, 2) + (0,) * 4, 1, 0)
)
def test_the_window_at_a_place_is_the_same_however_one_comes_there(
    uses: list[tuple[int, Phase, bool]], budget: Budget
) -> None:
    segment = segment_of(True, uses)
    segment.prepare(budget)
    along = Window(segment, budget, 0)
    along.extend()
    for position, (_, _, inside) in enumerate(uses):
        if inside:
            along.consume(position)
            along.extend()
        straight = Window(segment, budget, position + 1)
        straight.extend()
        if inside:
            assert (along.paid, along.kept) == (straight.paid, straight.kept)


@settings(deadline=None, max_examples=200)
@given(consumes, budgets, st.data())
def test_a_window_is_the_next_uses_that_fit(
    uses: list[tuple[int, Phase, bool]], budget: Budget, data: st.DataObject
) -> None:
    segment = segment_of(True, uses)
    segment.prepare(budget)
    position = data.draw(st.integers(0, len(uses)))
    window = Window(segment, budget, position)
    came = window.extend()
    assert sum(budget.nbytes[g] for g in window.kept) <= budget.keep
    limit = max(budget.prefetch, *budget.nbytes) if budget.prefetch else 0
    assert sum(budget.nbytes[g] for g in window.paid) <= limit
    assert came == sorted(came)
    if budget.keep == 0:
        # by definition: distinct groups in order of next use, as long as they fit, at least one
        groups: list[int] = []
        for group, _, inside in uses[position:]:
            if not inside or group in groups:
                continue
            size, taken = budget.nbytes[group], sum(budget.nbytes[g] for g in groups)
            if budget.prefetch == 0 or (size > 0 and taken > 0 and taken + size > budget.prefetch):
                break
            groups.append(group)
        assert [segment.uses[i] for i in came] == groups


def test_places_near_by_come_first() -> None:
    segment = Segment(True, [1, 3, 1, 3, 1, 3, 1])
    assert segment.near(3, 0) == [1, 3, 5]
    assert segment.near(3, 3) == [3, 5, 1]
    assert segment.near(3, 7) == [5, 3, 1]
    assert segment.near(5, 0) == []


@pytest.mark.parametrize(
    "past, expected",
    [
        ([], None),
        ([1], 1),
        ([1, 1, 1], 1),
        ([1, 1, 1, 2], 1),  # 2 is new: what was most frequent
        ([1, 2, 1, 2], 1),
        ([1, 2, 1, 2, 1], 2),
        ([1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1], 2),
        ([1, 1, 1, 2, 1, 1, 1, 2, 1, 1], 1),
        ([1, 1, 1, 1, 2, 1], 1),  # after 1 came 1 three times and 2 once
        ([1, 1, 1, 3, 3], 3),
        ([2, 1, 1, 3], 1),
    ],
)
def test_what_follows(past: list[int], expected: int | None) -> None:
    succession = Succession()
    for name in past:
        succession.append(name)
    assert succession.expected({1, 2, 3}) == expected


def test_only_the_names_asked_for_are_expected() -> None:
    succession = Succession()
    for name in [1, 2, 1, 2, 1]:
        succession.append(name)
    assert succession.expected({1}) == 1
    assert succession.expected({7}) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=32), st.integers(0, 1 << 16))
def test_a_rhythm_is_known_after_two_rounds(rhythm: list[int], seed: int) -> None:
    # The last round of something else before it must not matter: it is random.
    succession = Succession()
    choices = random.Random(seed)
    for name in [choices.randrange(5) for _ in range(32)]:
        succession.append(name)
    for name in rhythm * 3:
        succession.append(name)
    for name in rhythm:
        assert succession.expected(set(rhythm)) == name
        succession.append(name)

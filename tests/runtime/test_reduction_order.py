"""The few numbers by which ranks find out that they have reduced different weights."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtp.errors import DesyncError
from gtp.runtime.reduction_order import WORDS, ReductionOrder

CPU = torch.device("cpu")
OVER: Any = "group"  # anything that can be a key


def _words(order: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    noted = ReductionOrder()
    for index in order:
        noted.note(types.SimpleNamespace(process_group=OVER, index=index))  # type: ignore[arg-type]
    words = noted.words(OVER, dtype, CPU)
    assert words is not None
    assert words.shape == (WORDS,)
    return words


def _sum(words: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(WORDS, dtype=words[0].dtype)
    for each in words:
        total += each
    return total


orders = st.lists(st.integers(0, 500), max_size=30)


@given(order=orders, ranks=st.sampled_from([1, 2, 3, 8, 4096]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_ranks_that_agree_are_never_accused(order: list[int], ranks: int, dtype: torch.dtype) -> None:
    ReductionOrder().look(_sum([_words(order, dtype)] * ranks), ranks, "g")


@given(orders=st.lists(orders, min_size=2, max_size=8))
def test_ranks_that_differ_are_found_out(orders: list[list[int]]) -> None:
    if all(order == orders[0] for order in orders):
        orders[-1] = [*orders[-1], 7]
    with pytest.raises(DesyncError, match="group g have reduced the gradients of different weights"):
        ReductionOrder().look(_sum([_words(order) for order in orders]), len(orders), "g")


def test_one_of_a_thousand_is_found_out() -> None:
    with pytest.raises(DesyncError):
        ReductionOrder().look(_sum([*[_words([1, 2, 3])] * 999, _words([1, 3, 2])]), 1000, "g")


def test_what_comes_later_is_judged_when_it_is_there() -> None:
    order = ReductionOrder()
    arrived = False
    event: Any = types.SimpleNamespace(query=lambda: arrived)
    for sums in (_sum([_words([1]), _words([1])]), _sum([_words([1]), _words([2])])):
        order._coming.append((event, sums, 2, "g"))
    order.look_at_last()
    arrived = True
    with pytest.raises(DesyncError):
        order.look_at_last()
    order.look_at_last()  # once


def test_a_backward_begins_with_nothing_noted() -> None:
    order = ReductionOrder()
    group: Any = types.SimpleNamespace(process_group=OVER, index=3)
    order.note(group)
    first = order.words(OVER, torch.float32, CPU)
    order.reset()
    order.note(group)
    again = order.words(OVER, torch.float32, CPU)
    assert again is first  # nothing is made anew where nothing changes
    assert first is not None
    assert first.any()

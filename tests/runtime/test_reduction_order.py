"""The few numbers by which ranks find out that they have reduced different weights."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtp.errors import DesyncError
from gtp.runtime.reduction_order import ReductionOrder

CPU = torch.device("cpu")


class _Group:
    """As much of a process group as is asked."""

    def __init__(self, ranks: int, name: str = "g") -> None:
        self.ranks, self.group_name = ranks, name

    def size(self) -> int:
        return self.ranks


def _noted(order: Sequence[int], axes: Sequence[_Group]) -> ReductionOrder:
    noted = ReductionOrder()
    process_group, replicate_group = (*axes, None)[:2]
    for index in order:
        group: Any = types.SimpleNamespace(index=index, process_group=process_group, replicate_group=replicate_group)
        noted.note(group)
    return noted


def _words(order: Sequence[int], axes: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    words = torch.full((ReductionOrder.count(CPU, axes),), -1.0, dtype=dtype)
    _noted(order, axes).put_into(words, axes)
    return words


def _judge(orders: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> None:
    axes: Any = [_Group(len(orders))]
    total = torch.zeros(ReductionOrder.count(CPU, axes), dtype=dtype)
    for order in orders:
        total += _words(order, axes, dtype)
    ReductionOrder().judge(total, axes)


orders = st.lists(st.integers(0, 500), max_size=30)


@given(order=orders, ranks=st.sampled_from([2, 3, 8, 100]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_ranks_that_agree_are_never_accused(order: list[int], ranks: int, dtype: torch.dtype) -> None:
    _judge([order] * ranks, dtype)


@given(order=orders)
def test_the_sums_of_4096_ranks_are_exact_and_more_are_not_judged(order: list[int]) -> None:
    axes: Any = [_Group(64, "rows"), _Group(64, "columns")]
    words = _words(order, axes)
    total = torch.zeros_like(words)
    for _ in range(4096):
        total += words
    ReductionOrder().judge(total, axes)
    assert ReductionOrder.count(CPU, [*axes, _Group(2)]) == 0  # type: ignore[list-item]


@given(orders=st.lists(orders, min_size=2, max_size=8))
def test_ranks_that_differ_are_found_out(orders: list[list[int]]) -> None:
    if all(order == orders[0] for order in orders):
        orders[-1] = [*orders[-1], 7]
    with pytest.raises(DesyncError, match="group g have reduced the gradients of different weights"):
        _judge(orders)


def test_one_of_a_thousand_is_found_out() -> None:
    with pytest.raises(DesyncError):
        _judge([*[[1, 2, 3]] * 999, [1, 3, 2]])


def test_what_is_no_number_is_no_agreement() -> None:
    axes: Any = [_Group(2)]
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(DesyncError):
            ReductionOrder().judge(torch.full((ReductionOrder.count(CPU, axes),), wrong), axes)


def test_reductions_over_other_axes_say_nothing() -> None:
    gtp, replicate = _Group(2, "gtp"), _Group(2, "replicate")
    noted = _noted([1, 2], [gtp])
    assert noted.any
    both: Any = [gtp, replicate]
    words = torch.full((ReductionOrder.count(CPU, both),), -1.0)
    noted.put_into(words, both)
    assert not words.any()


def test_reductions_of_a_group_of_one_are_not_noted() -> None:
    """Another rank may have none, and the two must still send alike."""
    assert not _noted([1, 2], [_Group(1), _Group(1)]).any


def test_no_number_travels_on_a_gpu() -> None:
    assert ReductionOrder.count(torch.device("cuda"), [_Group(2)]) == 0  # type: ignore[list-item]


def test_a_backward_begins_with_nothing_noted() -> None:
    noted = _noted([3], [_Group(2)])
    noted.reset()
    assert not noted.any

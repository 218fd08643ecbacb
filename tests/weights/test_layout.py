"""Layout arithmetic by value, then its laws for any size. No torch.distributed, no ranks.

One test: `pytest tests/weights/test_layout.py -k worked_example`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtp.errors import GTPValueError
from gtp.weights.layout import ShardLayout


def test_worked_example_of_the_docstring() -> None:
    layouts = [ShardLayout((10, 3), 4, rank, 2) for rank in range(4)]
    assert [x.shard_shape for x in layouts] == [(4, 3)] * 4
    assert [x.row_range() for x in layouts] == [(0, 4), (4, 8), (8, 10), (10, 10)]
    assert [x.valid_rows for x in layouts] == [4, 4, 2, 0]
    assert [x.valid_numel for x in layouts] == [12, 12, 6, 0]
    assert [x.shard_slice for x in layouts] == [slice(0, 4), slice(4, 8), slice(8, 10), slice(10, 10)]
    assert [x.valid_slice for x in layouts] == [slice(0, 4), slice(0, 4), slice(0, 2), slice(0, 0)]
    first = layouts[0]
    assert (first.rows, first.trailing, first.row_numel, first.logical_numel) == (10, (3,), 3, 30)
    assert (first.padded_rows, first.padding_rows, first.padded_shape) == (16, 6, (16, 3))
    assert (first.shard_rows, first.shard_numel) == (4, 12)
    assert first.for_rank(2) == layouts[2]
    assert first.row_range(2) == (8, 10)


@pytest.mark.parametrize(
    "rows, group, alignment, shard_rows, ranges",
    [
        (10, 1, 1, 10, [(0, 10)]),
        (10, 1, 16, 16, [(0, 10)]),
        (7, 2, 1, 4, [(0, 4), (4, 7)]),
        (1, 3, 1, 1, [(0, 1), (1, 1), (1, 1)]),
        (0, 2, 4, 0, [(0, 0), (0, 0)]),
        (40, 2, 16, 32, [(0, 32), (32, 40)]),
        (70, 4, 16, 32, [(0, 32), (32, 64), (64, 70), (70, 70)]),
        (5, 4, 1, 2, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    ],
)
def test_shards_by_value(rows: int, group: int, alignment: int, shard_rows: int, ranges: list[tuple[int, int]]) -> None:
    layout = ShardLayout((rows, 3), group, 0, alignment)
    assert layout.shard_rows == shard_rows
    assert [layout.row_range(rank) for rank in range(group)] == ranges


def test_a_vector_has_rows_of_one_element() -> None:
    layout = ShardLayout((5,), 2, 1)
    assert (layout.trailing, layout.row_numel, layout.shard_shape, layout.valid_numel) == ((), 1, (3,), 2)


def test_a_torch_size_is_taken_as_a_plain_tuple() -> None:
    layout = ShardLayout(torch.Size((4, 2)), 2, 0)
    assert layout == ShardLayout((4, 2), 2, 0)
    assert type(layout.logical_shape) is tuple
    assert hash(layout) == hash(ShardLayout((4, 2), 2, 0))


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_shards_put_together_are_the_full_tensor(group: int) -> None:
    full = torch.randn(10, 3)
    layouts = [ShardLayout((10, 3), group, rank, 2) for rank in range(group)]
    shards = []
    for layout in layouts:
        shard = torch.zeros(layout.shard_shape)
        shard[layout.valid_slice] = full[layout.shard_slice]
        shards.append(shard)
    gathered = torch.cat(shards)
    assert gathered.shape == layouts[0].padded_shape
    assert torch.equal(gathered[:10], full)
    assert gathered[10:].count_nonzero() == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((), 2, 0), "first dim"),
        (((4, -1), 2, 0), "got -1 at dim 1"),
        (((4, 2.0), 2, 0), "got 2.0 at dim 1"),
        (((True, 2), 2, 0), "got True at dim 0"),
        (((4, 2), 0, 0), "group_size must be an integer >= 1, got 0"),
        (((4, 2), 2, 2), r"rank must be an integer in 0..1 for group_size 2, got 2.*not the global one"),
        (((4, 2), 2, -1), "got -1"),
        (((4, 2), 2, 0, 0), "alignment must be an integer >= 1, got 0"),
    ],
)
def test_wrong_values_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(GTPValueError, match=message):
        ShardLayout(*arguments)  # type: ignore[arg-type]


def test_ranks_outside_the_group_are_refused() -> None:
    layout = ShardLayout((4, 2), 2, 0)
    with pytest.raises(GTPValueError, match=r"row_range: rank must be an integer in 0..1, got 2"):
        layout.row_range(2)
    with pytest.raises(GTPValueError, match="got -1"):
        layout.for_rank(-1)


@given(
    rows=st.integers(0, 1 << 40),
    trailing=st.lists(st.integers(0, 1 << 20), max_size=3),
    group=st.integers(1, 4096),
    alignment=st.integers(1, 1 << 12),
    data=st.data(),
)
def test_laws(rows: int, trailing: list[int], group: int, alignment: int, data: st.DataObject) -> None:
    layout = ShardLayout((rows, *trailing), group, data.draw(st.integers(0, group - 1)), alignment)
    # equal, aligned shards that hold everything, and no smaller aligned ones would
    assert layout.shard_rows % alignment == 0
    assert layout.padded_rows == layout.shard_rows * group >= rows
    assert (layout.shard_rows - alignment) * group < rows or rows == layout.shard_rows == 0
    assert layout.padding_rows == layout.padded_rows - rows
    assert 0 <= layout.padding_rows < group * alignment
    # this rank
    start, stop = layout.row_range()
    assert 0 <= start <= stop <= rows
    assert layout.valid_rows == stop - start <= layout.shard_rows
    assert start == min(layout.rank * layout.shard_rows, rows)
    assert layout.valid_numel == layout.valid_rows * layout.row_numel <= layout.shard_numel
    assert layout.shard_slice == slice(start, stop)
    assert layout.valid_slice == slice(0, stop - start)
    assert layout.for_rank(layout.rank) == layout
    # neighbours touch, the first starts at 0 and the last ends at the end
    assert layout.row_range(0)[0] == 0
    assert layout.row_range(group - 1)[1] == rows
    if layout.rank:
        assert layout.row_range(layout.rank - 1)[1] == start


@given(rows=st.integers(0, 20_000), group=st.integers(1, 4096), alignment=st.integers(1, 64))
def test_every_row_is_stored_once(rows: int, group: int, alignment: int) -> None:
    layout = ShardLayout((rows,), group, 0, alignment)
    ranges = [layout.row_range(rank) for rank in range(group)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == rows
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert sum(stop - start for start, stop in ranges) == rows == layout.logical_numel


def test_group_of_4096_ranks() -> None:
    layout = ShardLayout((128_256, 8192), 4096, 4095, 16)
    assert (layout.shard_rows, layout.padded_rows, layout.padding_rows) == (32, 131_072, 2816)
    assert layout.row_range() == (128_256, 128_256)
    assert layout.row_range(4007) == (128_224, 128_256)
    assert layout.valid_numel == 0

"""`ShardLayout`: the arithmetic between a weight's logical shape and one rank's shard. Pure: no torch, no ranks."""

from __future__ import annotations

import dataclasses
import math

from gtp.errors import GTPValueError


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Which rows of a weight one rank stores, and where padding lies.

    Dim 0 is cut into shards of equal size: `shard_rows = ceil(rows / (group_size * alignment)) * alignment`. Padding is
    at the tail: the last shards may be part padding or all padding. 10 rows of 3, 4 ranks, alignment 2:

        full [10, 3]   rows  0  1  2  3 | 4  5  6  7 | 8  9  .  . | .  .  .  .      . is a row of padding
                       rank      0      |      1     |      2     |      3
        row_range         (0, 4)          (4, 8)       (8, 10)      (10, 10)
        shard_shape       (4, 3)          (4, 3)       (4, 3)       (4, 3)
        valid_rows           4               4            2            0
                       padded_rows 16, padding_rows 6

    A shard is filled by `shard[layout.valid_slice] = full[layout.shard_slice]`, rows past `valid_rows` are zero, and
    the shards of all ranks, one after the other, are the full weight once cut at `rows`.

    Attributes:
        logical_shape: Shape of the weight as the unsharded model has it, at least one dim; sizes may be 0.
        group_size: Number of ranks that share the weight, >= 1.
        rank: This rank's position in the group, 0 <= rank < group_size.
        alignment: Shard rows are a multiple of this, >= 1.

    Raises:
        GTPValueError: on any value outside the above.
    """

    logical_shape: tuple[int, ...]
    group_size: int
    rank: int
    alignment: int = 1

    def __post_init__(self) -> None:
        shape = tuple(self.logical_shape)
        if not shape:
            raise GTPValueError(
                "ShardLayout.logical_shape is (): a weight is sharded along its first dim and this one has none. "
                "Leave scalars replicated"
            )
        for dim, size in enumerate(shape):
            if not _is_int(size) or size < 0:
                raise GTPValueError(
                    f"ShardLayout.logical_shape must hold integers >= 0, got {size!r} at dim {dim} of {shape!r}"
                )
        if not _is_int(self.group_size) or self.group_size < 1:
            raise GTPValueError(
                f"ShardLayout.group_size must be an integer >= 1, got {self.group_size!r}: "
                "pass the number of ranks in the group"
            )
        if not _is_int(self.rank) or not 0 <= self.rank < self.group_size:
            raise GTPValueError(
                f"ShardLayout.rank must be an integer in 0..{self.group_size - 1} for group_size {self.group_size}, "
                f"got {self.rank!r}: pass the rank within the group, not the global one"
            )
        if not _is_int(self.alignment) or self.alignment < 1:
            raise GTPValueError(
                f"ShardLayout.alignment must be an integer >= 1, got {self.alignment!r}: 1 means no alignment"
            )
        # A torch.Size is a tuple too; keep the plain one, so that layouts compare and print alike.
        object.__setattr__(self, "logical_shape", shape)

    def for_rank(self, rank: int) -> ShardLayout:
        """The same weight as another rank of the group sees it.

        Raises:
            GTPValueError: `rank` is not in the group.
        """
        return dataclasses.replace(self, rank=rank)

    # -- the whole weight ------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the full weight, without padding."""
        return self.logical_shape[0]

    @property
    def trailing(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.logical_shape[1:]

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.trailing)

    @property
    def logical_numel(self) -> int:
        """Elements of the full weight, without padding."""
        return self.rows * self.row_numel

    @property
    def padded_rows(self) -> int:
        """Rows of all shards together."""
        return self.shard_rows * self.group_size

    @property
    def padding_rows(self) -> int:
        """Rows of padding of all shards together."""
        return self.padded_rows - self.rows

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of all shards one after the other, what a gather yields."""
        return (self.padded_rows, *self.trailing)

    # -- this rank's shard -----------------------------------------------------------------------------------------

    @property
    def shard_rows(self) -> int:
        """Rows of every shard, padding included."""
        return -(-self.rows // (self.group_size * self.alignment)) * self.alignment

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of every shard, padding included."""
        return (self.shard_rows, *self.trailing)

    @property
    def shard_numel(self) -> int:
        """Elements of every shard, padding included."""
        return self.shard_rows * self.row_numel

    def row_range(self, rank: int | None = None) -> tuple[int, int]:
        """Rows `start <= row < stop` of the full weight that a rank (`None`: this one) stores. May be empty.

        Raises:
            GTPValueError: `rank` is not in the group.
        """
        if rank is None:
            rank = self.rank
        elif not _is_int(rank) or not 0 <= rank < self.group_size:
            raise GTPValueError(f"row_range: rank must be an integer in 0..{self.group_size - 1}, got {rank!r}")
        size = self.shard_rows
        return min(rank * size, self.rows), min((rank + 1) * size, self.rows)

    @property
    def valid_rows(self) -> int:
        """Rows of this rank's shard that are not padding: the first ones."""
        start, stop = self.row_range()
        return stop - start

    @property
    def valid_numel(self) -> int:
        """Elements of this rank's shard that are not padding."""
        return self.valid_rows * self.row_numel

    @property
    def shard_slice(self) -> slice:
        """This rank's rows, as an index into dim 0 of the full weight."""
        return slice(*self.row_range())

    @property
    def valid_slice(self) -> slice:
        """The rows that are not padding, as an index into dim 0 of this rank's shard."""
        return slice(0, self.valid_rows)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

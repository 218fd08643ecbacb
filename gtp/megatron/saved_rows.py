"""`SavedRows`: where the rows of one shard lie in the tensor that Megatron's checkpoints hold. Needs megatron-core.

[Note: what the file holds] The file of an unsharded model, byte for byte: logical rows in the order of the unsharded
tensor, so that any layout, and Megatron without gtp, can load it. Two things stand in the way. Megatron places equal
parts on a grid, so the padding of the last shard would become rows of the tensor. And the fc1 of a gated MLP is two
matrices, gate and up, one below the other in each TP rank; in the file all gate rows come first, whatever the TP size,
so the rows of a shard that reaches from one into the other lie in two places. Mamba's in_proj stacks five matrices of
different heights, which are five tensors in the file.

Rows `[0, 10)` of a gated fc1, TP 2, GTP 2 of 5 rows each; `g` gate, `u` up, first digit the TP rank, second the GTP
rank whose shard holds the row:

    TP rank 0       g00 g00 g00 g00 g00 | u01 u01 u01 u01 u01
    TP rank 1       g10 g10 g10 g10 g10 | u11 u11 u11 u11 u11
    the file        g00 x 5, g10 x 5, u01 x 5, u11 x 5
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from gtp.errors import UnsupportedError
from gtp.weights.layout import ShardLayout

_PADDING = "padding"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Arithmetic between a shard and the global tensor of a checkpoint.

    Attributes:
        layout: Of the TP-local weight over the GTP group.
        tp_axis: Axis of the weight that tensor parallelism splits; None: every TP rank holds the same.
        tp_rank: This rank's place in it.
        tp_size: Its size.
        prepended: `(axis, offset, size)` of axes before the weight's own, such as layer and expert number.
        stacked: Suffixes of the keys of the matrices that each TP rank stacks; one, but for a gated fc1 or in_proj.
        heights: Rows of each of them in a TP rank; None: equally many.
        apart: Whether the stacked matrices are tensors of their own in the file, each under its key.
    """

    layout: ShardLayout
    tp_axis: int | None
    tp_rank: int
    tp_size: int
    prepended: tuple[tuple[int, int, int], ...] = ()
    stacked: tuple[str, ...] = ("",)
    heights: tuple[int, ...] | None = None
    apart: bool = False

    def parts(self) -> Iterator[tuple[str, slice, tuple[int, ...], tuple[int, ...]]]:
        """(suffix of the key, rows of the shard, offset in the global tensor, its shape) of each run of rows."""
        start, stop = self.layout.row_range()
        heights = self.heights or (self.layout.rows // len(self.stacked),) * len(self.stacked)
        row_splits = self.tp_size if self.tp_axis == 0 else 1
        row_rank = self.tp_rank if self.tp_axis == 0 else 0
        top = 0  # of the matrix, in the TP rank's stack
        for name, height in zip(self.stacked, heights, strict=True):
            first, last = max(start, top), min(stop, top + height)
            if first < last:
                row = row_rank * height + first - top
                if not self.apart:
                    row += top * row_splits
                tall = row_splits * (height if self.apart else sum(heights))
                offset, shape = self._around(row, tall)
                yield name if self.apart else "", slice(first - start, last - start), offset, shape
            top += height

    def _around(self, row: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offset, shape = [row], [rows]
        for axis, size in enumerate(self.layout.trailing, start=1):
            split = axis == self.tp_axis
            offset.append(self.tp_rank * size if split else 0)
            shape.append(self.tp_size * size if split else size)
        before = sorted(self.prepended)
        return (*(o for _, o, _ in before), *offset), (*(n for _, _, n in before), *shape)


@dataclasses.dataclass
class SavedRows(ShardedTensorFactory):  # type: ignore[misc]
    """A sharded weight in a sharded state dict; `dataclasses.replace` makes that of an optimizer's state.

    `data` is `[shard_rows, *trailing]`, the weight itself in a model's dict: Megatron's optimizers find the entry of a
    parameter by identity. When Megatron saves or loads it becomes one `ShardedTensor` per run of rows, padding none.
    """

    placement: Placement = dataclasses.field(kw_only=True)
    allow_shape_mismatch: bool = False

    @classmethod
    def of(cls, key: str, data: torch.Tensor, placement: Placement, replica_id: Any, **options: Any) -> SavedRows:
        """The entry `key`."""
        merge = functools.partial(_merge, placement.layout.trailing)
        return cls(key, data, None, merge, replica_id, placement=placement, **options)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return self.placement.layout.shard_shape

    def build(self) -> dict[str, Any]:
        """What is stored: `ShardedTensor`s, numbered. The rows of padding are kept aside, for loading.

        Raises:
            UnsupportedError: an optimizer asks for a slice of the flattened shard.
        """
        if self.flattened_range is not None:
            raise UnsupportedError(
                f"{self.key}: the optimizer's state was asked for in slices of flattened shards. Pass "
                'metadata={"distrib_optim_sharding_type": "fully_reshardable"} (or "dp_reshardable") to '
                "optimizer.sharded_state_dict"
            )
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            shard = self.data.detach().as_subclass(torch.Tensor)
            entries: dict[str, Any] = {}
            for number, (suffix, rows, offset, shape) in enumerate(self.placement.parts()):
                # axes in front belong to the data: Megatron takes them apart on regular grids only
                data = shard[rows].reshape((1,) * len(self.placement.prepended) + shard[rows].shape)
                entries[str(number)] = ShardedTensor(
                    self.key + suffix,
                    data,
                    data.dtype,
                    tuple(data.shape),
                    shape,
                    offset,
                    axis_fragmentations=None,
                    replica_id=self.replica_id,
                    allow_shape_mismatch=self.allow_shape_mismatch,
                )
            valid = self.placement.layout.valid_rows
            if valid < len(shard):
                entries[_PADDING] = LocalNonpersistentObject(torch.zeros_like(shard[valid:]))
        return entries


def _merge(trailing: tuple[int, ...], loaded: dict[str, torch.Tensor]) -> torch.Tensor:
    """The shard from its parts, padding last."""
    names = sorted(loaded, key=lambda name: math.inf if name == _PADDING else int(name))
    return torch.cat([loaded[name].reshape(-1, *trailing) for name in names])

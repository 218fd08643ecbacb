"""What the runtime knows of a weight: shapes, bytes and where its shard lies. No autograd, no nn.Parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from gtp.runtime.held import GradientMark


class ShardOwner(Protocol):
    """What the runtime asks of the parameter that holds a shard. `GTPWeight` is the one in this library."""

    def plain_shard(self) -> torch.Tensor:
        """The shard as a plain tensor that shares storage and version counter with the parameter."""
        ...

    def wants_gradient(self) -> bool:
        """Whether it requires grad."""
        ...

    def adopt(self, shard: torch.Tensor) -> None:
        """The transport moved the shard to memory of its own: use that storage from now on."""
        ...

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """Where the reduced gradient goes `[shard_rows, *trailing]`, and whether a value there is to be added to."""
        ...

    def new_gradient(self) -> torch.Tensor:
        """Fresh memory for a gradient of the shard, `[shard_rows, *trailing]`."""
        ...

    def gradient_delivered(self, target: torch.Tensor) -> None:
        """The target is complete, in the order of the current stream. Once per backward."""
        ...

    def swap_gradient(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Makes `grad` its `.grad`, and returns what that was, as autograd or the runtime left it."""
        ...

    def mark_held(self) -> GradientMark | None:
        """A gradient of it is held unreduced: see [Note: zeroing what is not there]. None: zeroing is not noticed."""
        ...

    def was_zeroed_since(self, mark: GradientMark) -> bool:
        """Whether the user has zeroed the gradient since then."""
        ...

    def run_gradient_hooks(self) -> None:
        """Shards may be written again: run post-accumulate-grad hooks. Once per backward, after delivery."""
        ...


@dataclasses.dataclass(eq=False, slots=True)
class Member:
    """One weight of a group, as the runtime sees it on this rank.

    Attributes:
        name: Fully qualified name in the model, for errors and traces.
        rows: Logical rows of the full weight (dim 0), without padding.
        shard_rows: Rows of every rank's shard, padding included; `shard_rows * group size >= rows`.
        trailing: Shape of the remaining dims, the same on all ranks.
        shard: This rank's shard `[shard_rows, *trailing]`, a plain tensor over the parameter's storage.
        send: What is gathered, same shape as `shard` in the compute dtype: `shard` itself, or a copy of it.
        owner: The parameter. Weak: the parameter holds the runtime, and a strong edge back would keep a deleted
            model's storage alive until the cyclic garbage collector runs.
        logical_shape: `(rows, *trailing)`.
    """

    name: str
    rows: int
    shard_rows: int
    trailing: tuple[int, ...]
    shard: torch.Tensor
    send: torch.Tensor
    owner: Callable[[], ShardOwner | None]
    logical_shape: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.logical_shape = (self.rows, *self.trailing)

    def padded_shape(self, size: int) -> tuple[int, ...]:
        """Shape of the gathered buffer over `size` ranks, tail padding included."""
        return (self.shard_rows * size, *self.trailing)

    def gathered_numel(self, size: int) -> int:
        return self.shard_rows * size * math.prod(self.trailing)


@dataclasses.dataclass(eq=False, slots=True)
class WeightGroup:
    """One or more weights that are gathered together.

    Attributes:
        index: Position in the runtime, the same on all ranks; the schedule knows groups by it.
        name: The leader's name, with the count where there are several.
        members: Leader first.
        process_group: The GTP axis.
        rank, size: This rank in `process_group`, and its size.
        replicate_group: The axis over which shards are replicated, or None.
        compute_dtype: Dtype of the gathered weights.
        shown: Whether forwards of the user's see full weights (`unshard=`), and may keep them for later.
    """

    index: int
    name: str
    members: list[Member]
    process_group: dist.ProcessGroup
    rank: int
    size: int
    replicate_group: dist.ProcessGroup | None
    compute_dtype: torch.dtype
    shown: bool = False

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered weights of this group, padding included."""
        return sum(m.gathered_numel(self.size) for m in self.members) * self.compute_dtype.itemsize

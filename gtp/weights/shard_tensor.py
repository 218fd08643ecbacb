"""`ShardTensor`: a weight as state dicts show it: the logical shape, of which this process holds its rows.

[Note: checkpoints hold logical rows] torch.distributed.checkpoint (DCP) writes a plain tensor once, whichever rank
has it, because it takes equal names for equal values. A shard under its weight's name would so be saved as the rows
of one rank alone. Tensors that implement DCP's per-tensor protocol (`torch.distributed._checkpointable`) say
themselves which chunk of which global tensor they are. `CheckpointableShard` does: global shape and offsets are
logical, padding is never part of a chunk, a shard that is all padding writes nothing, and replicas name the same
chunk, so DCP writes it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, GTPValueError, UnsupportedError
from gtp.runtime.process_group import gather_now
from gtp.weights.askers import refuse_asking_collective
from gtp.weights.layout import ShardLayout

# What torch does to values of state dicts without looking at them: copies, moves, empty ones to load into.
_LOCAL = frozenset(
    ["aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::empty_like", "aten::zeros_like"]
)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardOrigin:
    """Which rows of which weight a shard is.

    Attributes:
        name: Fully qualified name, for errors.
        layout: Arithmetic between logical shape and shard.
        process_group: The ranks that hold the other rows.
        is_whole: Whether the shard is the weight.
        shape: Of the shard.
        has_padding: Whether some of its last rows are no rows of the weight.
    """

    name: str
    layout: ShardLayout
    process_group: dist.ProcessGroup
    is_whole: bool = dataclasses.field(init=False)
    shape: tuple[int, ...] = dataclasses.field(init=False)
    has_padding: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # asked at every arithmetic of every optimizer
        object.__setattr__(self, "is_whole", is_whole(self.layout))
        object.__setattr__(self, "shape", self.layout.shard_shape)
        object.__setattr__(self, "has_padding", self.layout.valid_rows != self.layout.shard_rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardOrigin:
        return self  # a process group cannot be copied, and a copied tensor is still these rows


def is_whole(layout: ShardLayout) -> bool:
    """Whether the shard is the weight. Equal shapes do not say so: one row over four ranks makes shards of one row."""
    return layout.group_size == 1 and layout.shard_rows == layout.rows


class CheckpointableShard:
    """Mixin: DCP's per-tensor protocol for a tensor that is, or stands for, a shard."""

    __slots__ = ()

    def checkpoint_part(self) -> tuple[torch.Tensor, ShardLayout]:
        """The shard as a plain tensor `[shard_rows, *trailing]`, padding included, and its layout."""
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        shard, layout = self.checkpoint_part()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(shard),
                    size=torch.Size(layout.logical_shape),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        _, layout = self.checkpoint_part()
        start, stop = layout.row_range()
        # a weight without any row is still a key of the file: the first rank writes an empty chunk
        if start == stop and not (layout.rows == 0 and layout.rank == 0):
            return []
        offsets = torch.Size([start, *[0] * len(layout.trailing)])
        return [ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([stop - start, *layout.trailing]))]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        shard, layout = self.checkpoint_part()
        start, _ = layout.row_range()
        if index.offset is not None and tuple(index.offset) != (start, *[0] * len(layout.trailing)):
            raise GTPStateError(
                f"{index.fqn}: the checkpoint plan asks this rank for the chunk at {tuple(index.offset)}, and it "
                f"holds rows from {start} on. The plan was made for another model or another rank"
            )
        return shard[layout.valid_slice]


# Calls a C function on subclasses of Tensor as if they were plain, in a fifth of what `__torch_function__` takes.
past_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl

_get_is_sparse = torch.Tensor.is_sparse.__get__  # type: ignore[attr-defined]


class LocalShard(CheckpointableShard):
    """Mixin: a tensor of a shard's shape, which holds this rank's rows. What torch functions may do to it is in
    `gtp.weights.rules`.

    Attributes:
        origin: Which rows of which weight they are.
        memory_of: A weak reference to the weight whose memory this is; None where it is memory of its own.
    """

    __slots__ = ()

    is_weight = False
    origin: ShardOrigin
    memory_of: Callable[[], Any] | None = None

    # optimizers ask for every weight
    is_sparse: Any = property(lambda self: past_torch_function(_get_is_sparse, (), (self,)))

    @property
    def label(self) -> str:
        """For errors."""
        raise NotImplementedError

    @property
    def shard(self) -> torch.Tensor:
        """The same rows `[shard_rows, *trailing]` as a plain tensor, padding included, over the same storage."""
        raise NotImplementedError

    def local_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` marked as this rank's rows, if it has the shard's shape and the shard is not the whole."""
        raise NotImplementedError

    def new_state(self, fresh: torch.Tensor) -> torch.Tensor:
        """As `local_state`, of a plain tensor of the shard's shape that nobody else has; it may become rows itself."""
        raise NotImplementedError

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # the one method that torch does not ask __torch_function__ about
        """Not supported: rows keep their memory.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{self.label}: set_ would give it other memory, which is no rows. Copy into it: copy_(...)"
        )

    def is_complex(self) -> bool:
        """Asked by collectives of torch, just before they take the memory of the shard."""
        refuse_asking_collective(self)
        return bool(past_torch_function(torch.Tensor.is_complex, (), (self,)))

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)  # of a tensor it is that of its value; there is none of a shard alone

    def valid_rows(self) -> torch.Tensor:
        """The rows that are not padding, a plain local tensor `[valid_rows, *trailing]`."""
        return self.shard[: self.origin.layout.valid_rows]

    def full_tensor(self) -> torch.Tensor:
        """All ranks' rows `[rows, *trailing]`, a fresh plain tensor. Collective over the weight's GTP group."""
        return gather_now(self.shard, self.origin.process_group)[: self.origin.layout.rows].clone()


class ShardTensor(CheckpointableShard, torch.Tensor):
    """A sharded weight (or optimizer state of one) in a state dict.

    Shape, dtype and device are those of the whole weight `[rows, *trailing]`; the values here are this rank's rows.
    DCP saves and loads it as rows of the whole; `load_state_dict` of a model sharded alike takes it. It can be
    cloned, moved and cast. Whatever would need other ranks' values raises `UnsupportedError`, and so does
    `torch.save`: a file of one rank's rows looks like a checkpoint and is not one.

    Args:
        shard: `[shard_rows, *trailing]`, plain, padding included. Kept, not copied.
        origin: Which rows of which weight they are.

    Raises:
        GTPValueError: the shard does not have the layout's shape.
    """

    _shard: torch.Tensor
    _origin: ShardOrigin

    @staticmethod
    def __new__(cls, shard: torch.Tensor, origin: ShardOrigin) -> ShardTensor:
        if tuple(shard.shape) != origin.layout.shard_shape:
            raise GTPValueError(
                f"{origin.name}: a ShardTensor takes the shard {origin.layout.shard_shape}, padding included, got "
                f"{tuple(shard.shape)}"
            )
        wrapper: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, origin.layout.logical_shape, dtype=shard.dtype, device=shard.device
        )
        wrapper._shard = shard
        wrapper._origin = origin
        return wrapper

    # Shape, dtype and device need no interception; values are guarded below autograd, by __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's rows and padding `[shard_rows, *trailing]`, a plain tensor; not a copy."""
        return self._shard

    @property
    def origin(self) -> ShardOrigin:
        """Which rows of which weight these are."""
        return self._origin

    def full_tensor(self) -> torch.Tensor:
        """All rows `[rows, *trailing]`, a fresh plain tensor. Collective over the weight's GTP group."""
        return gather_now(self._shard, self._origin.process_group)[: self._origin.layout.rows].clone()

    def checkpoint_part(self) -> tuple[torch.Tensor, ShardLayout]:
        return self._shard, self._origin.layout

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        first = args[0] if args else None
        if isinstance(first, ShardTensor):
            if name in _LOCAL:
                return cls(func(first._shard, *args[1:], **kwargs), first._origin)
            if name == "aten::new_empty" and tuple(args[1]) == first._origin.layout.logical_shape:
                return cls(func(first._shard, first._origin.layout.shard_shape, **kwargs), first._origin)
            if name == "aten::copy_" and _same_rows(first, args[1]):
                first._shard.copy_(args[1]._shard, *args[2:], **kwargs)
                return first
        raise _needs_other_rows(name, [*args, *kwargs.values()])

    def numpy(self, *, force: bool = False) -> Any:
        """Not of rows alone.

        Raises:
            UnsupportedError: always.
        """
        raise _needs_other_rows("numpy", [self])

    def tolist(self) -> Any:
        """As `numpy`."""
        raise _needs_other_rows("tolist", [self])

    def untyped_storage(self) -> Any:
        """Asked by what writes memory to files, such as safetensors.

        Raises:
            GTPValueError: always. Not NotImplementedError, which safetensors takes for a tensor without memory.
        """
        raise GTPValueError(str(_needs_other_rows("untyped_storage", [self])))

    storage = untyped_storage

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        copied = memo[id(self)] = ShardTensor(self._shard.clone(), self._origin)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_pickle(self._origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._origin.layout
        start, stop = layout.row_range()
        return (
            f"ShardTensor({self._origin.name!r}, rows {start}:{stop} of {layout.logical_shape}, rank {layout.rank} of "
            f"{layout.group_size}, {self.dtype}, {self.device})"
        )


def _same_rows(target: ShardTensor, source: Any) -> bool:
    return isinstance(source, ShardTensor) and source._origin.layout == target._origin.layout


def _needs_other_rows(name: str, values: list[Any]) -> UnsupportedError:
    shards = [value for value in _flatten(values) if isinstance(value, ShardTensor)]
    label = shards[0]._origin.name if shards else "a ShardTensor"
    return UnsupportedError(
        f"{label}: {name} on a value of a sharded model's state dict, of which this rank holds some rows. All ranks "
        "together: value.full_tensor() or gtp.full_state_dict(model); this rank's rows: value.shard. A checkpoint "
        "or optimizer state is loaded with gtp.checkpoint.load or gtp.checkpoint.load_optimizer_state_dict"
    )


def _flatten(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _flatten(value) if isinstance(value, (list, tuple)) else [value]
    return flat


def no_pickle(origin: ShardOrigin) -> UnsupportedError:
    """The error of who pickles rows."""
    start, stop = origin.layout.row_range()
    return UnsupportedError(
        f"{origin.name}: this is rows {start}:{stop} of {origin.layout.logical_shape}, and torch.save or pickle "
        "would write a file that looks whole. gtp.checkpoint.save(path, model, optimizer) writes a checkpoint that "
        "any number of ranks loads; torch.save(gtp.full_state_dict(model, rank0_only=True), path) writes an "
        "ordinary one"
    )

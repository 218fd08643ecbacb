"""`ShardRows`: a tensor that holds this rank's rows of something of a weight's shape, and knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gtp.errors import GTPValueError
from gtp.runtime.held import mark_of
from gtp.weights.layout import ShardLayout
from gtp.weights.rules import apply, call_plain, needs_full, plain_access
from gtp.weights.shard_tensor import LocalShard, ShardOrigin, no_pickle


class ShardRows(LocalShard, torch.Tensor):
    """This rank's rows `[shard_rows, *trailing]` of a weight's value, gradient or optimizer state, padding included.

    What `GTPWeight.grad`, `weight.data`, `weight.detach()`, `torch.zeros_like(weight)` and arithmetic on any of them
    give. Arithmetic is local, as optimizers want it, and what comes of it is `ShardRows` again. Norms
    (`torch.linalg.vector_norm`, `torch.norm`, `torch._foreach_norm`, so also `torch.nn.utils.clip_grad_norm_`) are
    those of the whole without padding, the same on all ranks, and collective. Gradient unscaling of
    `torch.amp.GradScaler` agrees over ranks whether a value was infinite. Everything else raises `UnsupportedError`:
    see [Note: one shard is not the weight]. `.shard` is the plain local tensor for who wants it, `.full_tensor()` the
    whole.

    Rows that are a weight's own memory (`weight.data`, `weight.detach()`, views of them) know the weight, and it is
    told before they are written: whenever they were taken, a write is ordered against gathers. All ranks must write
    alike; looking costs nothing and is each rank's own business.

    torch.distributed.checkpoint saves it as rows of the whole, also out of
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. Loading such a state dict with plain
    `torch.distributed.checkpoint.load` takes torch >= 2.14; older ones refuse it because of its size.
    `gtp.checkpoint` saves and loads with all of them.
    """

    @staticmethod
    def of(tensor: torch.Tensor, origin: ShardOrigin, weight: Callable[[], Any] | None = None) -> torch.Tensor:
        """`tensor` `[shard_rows, *trailing]` marked as rows, over the same storage; itself where a shard is all.

        Args:
            tensor: Plain.
            origin: Which rows they are.
            weight: A weak reference to the `GTPWeight` whose memory `tensor` is, if it is one's.
        """
        if origin.is_whole:
            return tensor
        with plain_access():
            if tensor.requires_grad:
                rows = tensor.as_subclass(ShardRows)
            else:  # no view: those cannot be detached in place, which is an old way to zero gradients
                rows = torch.Tensor._make_subclass(ShardRows, tensor)
        rows.origin = origin
        if weight is not None:
            rows.memory_of = weight
        return rows

    @staticmethod
    def out_of(fresh: torch.Tensor, origin: ShardOrigin) -> torch.Tensor:
        """As `of`, of a plain tensor that nobody else has: the object itself becomes rows."""
        if origin.is_whole:
            return fresh
        fresh.__class__ = ShardRows
        fresh.origin = origin  # type: ignore[attr-defined]
        return fresh

    @property
    def label(self) -> str:
        return f"this rank's rows of sharded weight {self.origin.name!r}, or of its gradient"

    @property
    def shard(self) -> torch.Tensor:
        """The plain local tensor over the same storage. Where that is a weight's: for looking, as `GTPWeight.shard`."""
        with plain_access():
            return self.detach().as_subclass(torch.Tensor)

    def local_state(self, tensor: torch.Tensor) -> torch.Tensor:
        with plain_access():
            if tensor.shape != self.origin.shape:
                return tensor
            is_alias = self.memory_of is not None and tensor.data_ptr() == self.data_ptr()
        rows = ShardRows.of(tensor, self.origin, self.memory_of if is_alias else None)
        mark = mark_of(self)
        if mark is not None and tensor.data_ptr() == self.data_ptr():  # zeroing the alias zeroes the gradient
            rows.gradient_mark = mark  # type: ignore[attr-defined]
        return rows

    def new_state(self, fresh: torch.Tensor) -> torch.Tensor:
        return ShardRows.out_of(fresh, self.origin)

    def checkpoint_part(self) -> tuple[torch.Tensor, ShardLayout]:
        return self.shard, self.origin.layout

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name: str = getattr(func, "__name__", str(func))
        if name == "__get__":
            return _get(func, args)
        if name in ("__set__", "__delete__"):
            return _set(func, args)
        return apply(func, name, args, kwargs or {})

    # torch >= 2.14 looks here for the global size when it loads

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.origin.layout.logical_shape

    @property
    def global_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where this rank's rows begin in the whole: one entry, or none for a shard that is all padding."""
        return tuple(tuple(chunk.offsets) for chunk in self.__create_chunk_list__())

    @property
    def local_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of this rank's rows without padding."""
        return tuple(tuple(chunk.sizes) for chunk in self.__create_chunk_list__())

    @property
    def local_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where these rows begin in this tensor."""
        return tuple((0,) * len(chunk.sizes) for chunk in self.__create_chunk_list__())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = ShardRows.of(self.shard.clone(), self.origin)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_pickle(self.origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self.origin.layout
        start, stop = layout.row_range()
        return f"ShardRows({self.origin.name!r}, rows {start}:{stop} of {layout.logical_shape}, {self.shard!r})"


def _set(func: Any, args: tuple[Any, ...]) -> Any:
    rows: ShardRows = args[0]
    if getattr(getattr(func, "__self__", None), "__name__", "") == "data" and args[1].shape != rows.origin.shape:
        raise GTPValueError(
            f"{rows.label} have the shape {rows.origin.shape}, got .data of shape {tuple(args[1].shape)}; to write "
            "full weights use gtp.full_weights(model, write=True)"
        )
    return call_plain(func, args, {})


def _get(func: Any, args: tuple[Any, ...]) -> Any:
    rows: ShardRows = args[0]
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "data":  # with the version counter, by which prefetched copies know that they are stale
        return rows.detach()
    value = call_plain(func, args, {})
    if not isinstance(value, torch.Tensor):
        return value
    if attribute == "_base":
        return value
    if attribute in ("grad", "_grad"):
        return value if isinstance(value, LocalShard) else rows.local_state(value)
    raise needs_full(func, f"Tensor.{attribute}", rows)

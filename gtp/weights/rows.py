"""`ShardRows`: a tensor that holds this rank's rows of something of a weight's shape, and knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

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

    torch.distributed.checkpoint saves it as rows of the whole, also out of
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. Loading such a state dict with plain
    `torch.distributed.checkpoint.load` takes torch >= 2.14; older ones refuse it because of its size.
    `gtp.checkpoint` saves and loads with all of them.
    """

    _origin: ShardOrigin

    @staticmethod
    def of(tensor: torch.Tensor, origin: ShardOrigin) -> torch.Tensor:
        """`tensor` `[shard_rows, *trailing]` marked as rows, over the same storage; itself where a shard is all."""
        if origin.is_whole:
            return tensor
        with plain_access():
            rows = (tensor if tensor.requires_grad else tensor.detach()).as_subclass(ShardRows)
        rows._origin = origin
        return rows

    @property
    def origin(self) -> ShardOrigin:
        return self._origin

    @property
    def label(self) -> str:
        return f"this rank's rows of sharded weight {self._origin.name!r}, or of its gradient"

    @property
    def shard(self) -> torch.Tensor:
        """The plain local tensor over the same storage."""
        with plain_access():
            return self.detach().as_subclass(torch.Tensor)

    def local_state(self, tensor: torch.Tensor) -> torch.Tensor:
        with plain_access():
            shape = tensor.shape
        return ShardRows.of(tensor, self._origin) if shape == self._origin.shape else tensor

    def checkpoint_part(self) -> tuple[torch.Tensor, ShardLayout]:
        return self.shard, self._origin.layout

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name: str = getattr(func, "__name__", str(func))
        if name == "__get__":
            return _get(func, args)
        if name in ("__set__", "__delete__"):
            return call_plain(func, args, {})
        return apply(func, name, args, kwargs or {})

    # torch >= 2.14 looks here for the global size when it loads

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self._origin.layout.logical_shape

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
        copied = memo[id(self)] = ShardRows.of(self.shard.clone(), self._origin)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_pickle(self._origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._origin.layout
        start, stop = layout.row_range()
        return f"ShardRows({self._origin.name!r}, rows {start}:{stop} of {layout.logical_shape}, {self.shard!r})"


def _get(func: Any, args: tuple[Any, ...]) -> Any:
    value = call_plain(func, args, {})
    if not isinstance(value, torch.Tensor):
        return value
    rows: ShardRows = args[0]
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "_base":
        return value
    if attribute in ("data", "grad", "_grad"):
        return value if isinstance(value, LocalShard) else rows.local_state(value)
    raise needs_full(func, f"Tensor.{attribute}", rows)

"""`ShardMemory`: what `weight.data` and `weight.detach()` of a `MegatronGTPWeight` are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gtp.weights.rules import METADATA, call_plain, tensors_in, writes

_plain = torch._C.DisableTorchFunctionSubclass


class ShardMemory(torch.Tensor):
    """A weight's own memory, or a view of it: a plain tensor to whoever reads it, and the weight is told before a torch
    function writes it, so that the write is ordered against gathers. `torch.distributed` and C++ extensions write it
    unseen, as Megatron's buffers are written. All ranks must write alike. Padding stays zero.

    What is computed from it is plain, and so are copies and what is pickled.
    """

    owner: Callable[[], Any]

    @classmethod
    def of(cls, memory: torch.Tensor, owner: Callable[[], Any]) -> torch.Tensor:
        """`memory`, plain, which is part of the shard of the weight that `owner()` returns, or None when it is gone."""
        with _plain():
            # not `as_subclass`, of which the result is a view: Megatron's buffers ask
            marked: ShardMemory = torch.Tensor._make_subclass(cls, memory)
        marked.owner = owner
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            # torch's own `.data` would have a version counter of its own
            return args[0].detach() if attribute == "data" else call_plain(func, args, kwargs)
        if name in METADATA or name in ("__set__", "__delete__", "as_subclass"):
            return call_plain(func, args, kwargs)
        owners = [t.owner() for t in _written(name, args, kwargs) if isinstance(t, cls)]
        weights = list(dict.fromkeys(weight for weight in owners if weight is not None))
        for weight in weights:
            weight.before_write()
        if all(kind is cls for kind in types):
            result = call_plain(func, args, kwargs)
        else:  # weights, gradients and rows have rules of their own
            result = func(*_unmarked(args), **_unmarked(kwargs))
        for weight in weights:
            weight.clear_padding()
        source = next((t for t in tensors_in((*args, *kwargs.values())) if isinstance(t, cls)), None)
        return result if source is None else _views_marked(result, source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _plain():
            return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _plain():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if not writes(name, kwargs):
        return []
    if kwargs.get("out") is not None:
        return tensors_in([kwargs["out"]])
    return tensors_in((*args, *kwargs.values()) if name.startswith("_fused_") else args[:1])


def _unmarked(values: Any) -> Any:
    if isinstance(values, ShardMemory):
        with _plain():
            return values.as_subclass(torch.Tensor)
    if isinstance(values, dict):
        return {key: _unmarked(value) for key, value in values.items()}
    return type(values)(map(_unmarked, values)) if type(values) in (list, tuple) else values


def _views_marked(result: Any, source: ShardMemory) -> Any:
    """What shares the source's storage, marked like it."""
    if isinstance(result, (list, tuple)):
        return type(result)(_views_marked(r, source) for r in result) if type(result) in (list, tuple) else result
    if type(result) is not torch.Tensor or not result.numel():
        return result
    with _plain():
        shares = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return ShardMemory.of(result, source.owner) if shares else result

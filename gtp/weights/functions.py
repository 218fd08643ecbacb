"""What torch functions do with a sharded weight.

`F.linear` and `F.embedding` run the sharded path. `weight.data`, `weight.detach()` and `weight.grad` are `ShardRows`.
Metadata and, without grad mode, arithmetic are the shard's, by the rules that all shards share (`gtp.weights.rules`).
Everything else would need the full weight and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from gtp.errors import GTPStateError, UnsupportedError
from gtp.ops import embedding, linear
from gtp.weights import differentiate
from gtp.weights.askers import ASKED, refuse_asker, transform_level
from gtp.weights.rules import (
    METADATA,
    apply,
    call_plain,
    needs_full,
    plain_access,
    refuse_transforms,
)
from gtp.weights.shard_tensor import is_whole

if TYPE_CHECKING:
    from gtp.weights.parameter import GTPWeight

# Getters that are views of the data as a matrix, so of the full weight.
_MATRIX_VIEWS = frozenset(["T", "mT", "H", "mH", "real", "imag"])

_MOVES = frozenset(["to", "cpu", "cuda"])


def dispatch(kind: type, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func`, one of whose arguments is a `kind` (`GTPWeight`, handed in because it imports this file), or raises.

    Raises:
        UnsupportedError: the function would need the full weight.
        GTPValueError: a tensor in the arithmetic does not have the shard's shape.
    """
    if func is F.linear or func is F.embedding:
        if transform_level() is not None:  # asked here, because it is asked once per GEMM
            refuse_transforms(func.__name__, args, kwargs)
        return linear(*args, **kwargs) if func is F.linear else embedding(*args, **kwargs)
    if func is torch.autograd.backward:  # its `inputs` may be weights
        return differentiate.backward(kind, args, kwargs)
    name: str = getattr(func, "__name__", str(func))
    if name in METADATA:
        if name in ASKED:
            refuse_asker(name, args)
        return call_plain(func, args, kwargs)
    if name == "__get__":
        return _get(func, args)
    if name in ("__set__", "__delete__"):
        return _set(func, name, args)
    if name == "detach":
        refuse_asker(name, args)
        return args[0].writable_shard()
    if func is torch.autograd.grad:
        return differentiate.grad(kind, args, kwargs)
    if name in _MOVES and isinstance(args[0], kind):
        _check_move(name, args, kwargs, cast("GTPWeight", args[0]))
    return apply(func, name, args, kwargs)


def _get(func: Any, args: tuple[Any, ...]) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute in _MATRIX_VIEWS and not is_whole(args[0].handle.layout):
        raise needs_full(func, f"Tensor.{attribute}", args[0])
    if attribute == "data":
        return args[0].writable_shard()
    return args[0].grad if attribute == "grad" else call_plain(func, args, {})


def _set(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    weight: GTPWeight = args[0]
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "grad":
        weight.grad = args[1] if name == "__set__" else None
        return None
    if attribute == "data" and name == "__set__":
        return weight.set_data(args[1])
    return call_plain(func, args, {})


def _check_move(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], weight: GTPWeight) -> None:
    with plain_access():
        source = weight.device
    target = source
    if name in ("cpu", "cuda"):
        target = torch.device(name)
    else:
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, (str, torch.device)):
                target = torch.device(value)
            elif isinstance(value, torch.Tensor):
                target = value.device
    if target.type != source.type:
        raise UnsupportedError(
            f"{weight.label}: moving a sharded weight from {source} to {target} would leave its runtime behind. "
            "Move the model before gtp.shard_model; to look at the shard elsewhere use weight.shard.to(...)"
        )


def not_the_leader(weight: GTPWeight) -> GTPStateError:
    """The error of a weight that is used by itself and is a later member of a group that is gathered together."""
    leader = weight.handle.group.members[0].name
    return GTPStateError(
        f"{weight.handle.name}: it is gathered together with {leader}, which answers for the group; "
        "use the group as a whole (gtp.ops.grouped_linear), or shard the weights one by one"
    )

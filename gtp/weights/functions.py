"""What torch functions may do to a sharded weight.

Three kinds. Metadata and aliases (`shape`, `detach`, `grad`, ...) are the shard's. Elementwise arithmetic without grad
mode, between the shard and tensors of the shard's shape, is what optimizers do, and local. `F.linear` and `F.embedding`
run the sharded path. Everything else would need the full weight and raises, because on a shard it would be a wrong
number without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from gtp.errors import GTPStateError, GTPValueError, UnsupportedError
from gtp.ops import embedding, linear

if TYPE_CHECKING:
    from gtp.weights.parameter import GTPWeight

_plain = torch._C.DisableTorchFunctionSubclass

# Getters that are views of the data as a matrix, so of the full weight.
_MATRIX_VIEWS = frozenset(["T", "mT", "H", "mH", "real", "imag"])

_METADATA = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous element_size data_ptr type_as
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size get_device untyped_storage
    storage_type _typed_storage storage requires_grad_ retain_grad is_shared is_pinned has_names names
    dense_dim sparse_dim _is_view __hash__ __len__ is_tensor is_storage is_set_to
    _has_compatible_shallow_copy_type
    """.split()
)

# New tensors with the shard's metadata; nothing of its values.
_FACTORIES = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_empty new_zeros new_ones new_full".split()
)

_ELEMENTWISE = frozenset(
    """
    add sub subtract mul multiply div divide true_divide rsub addcmul addcdiv lerp sqrt rsqrt square pow neg
    negative sign abs absolute exp log reciprocal maximum minimum clamp clamp_min clamp_max where copy zero fill
    clone to float half bfloat16 double masked_fill copysign nan_to_num cpu cuda contiguous
    """.split()
)

_MULTI_TENSOR_REDUCTIONS = frozenset(["_foreach_norm", "_foreach_max"])

_RANDOM_FILLS = frozenset("normal uniform random bernoulli cauchy exponential geometric log_normal erfinv".split())

_MOVES = frozenset(["to", "cpu", "cuda"])


def dispatch(kind: type, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func`, one of whose arguments is a `kind` (`GTPWeight`, handed in because it imports this file), or raises.

    Raises:
        UnsupportedError: the function would need the full weight.
        GTPValueError: a tensor in the arithmetic does not have the shard's shape.
    """
    if func is F.linear:
        return linear(*args, **kwargs)
    if func is F.embedding:
        return embedding(*args, **kwargs)
    if func is torch.autograd.backward:  # its `inputs` may be weights
        return _call_plain(func, args, kwargs)
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        return _get(func, args)
    if name in ("__set__", "__delete__"):
        return _set(func, name, args)
    if name == "detach":
        return args[0].writable_shard()
    if name in _METADATA:
        return _call_plain(func, args, kwargs)
    weights = [cast("GTPWeight", t) for t in _tensors_in((*args, *kwargs.values())) if isinstance(t, kind)]
    if name in _FACTORIES:
        return weights[0].local_state(_call_plain(func, args, kwargs))
    if func is torch.autograd.grad:
        return _autograd_grad(args, kwargs, weights)
    if all(w.handle.group.size == 1 for w in weights):
        return _in_place_or_not(func, name, args, kwargs, weights)
    base = name.rstrip("_") if not name.startswith("__") else name
    if name.endswith("_") and base in _RANDOM_FILLS:
        raise UnsupportedError(
            f"{_label(weights)}: {name} would draw this rank's rows from a seed of its own, and the full weight would "
            "depend on the number of ranks. Initialize the model before gtp.shard_model, or build it on the meta "
            "device and pass init="
        )
    if name.startswith(("_foreach_", "_fused_")) and name not in _MULTI_TENSOR_REDUCTIONS:
        return _in_place_or_not(func, name, args, kwargs, weights)
    if base not in _ELEMENTWISE and not (base.startswith("__i") and base.endswith("__")):
        raise _needs_full(name, weights)
    _check_elementwise(name, args, kwargs, weights)
    return weights[0].local_value(_in_place_or_not(func, name, args, kwargs, weights))


def _autograd_grad(args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[GTPWeight]) -> Any:
    """`torch.autograd.grad` with respect to sharded weights: reduced gradients of the shards, returned by autograd.

    What `torch.cuda.make_graphed_callables` calls, so also what a graphed layer replays.
    """
    with contextlib.ExitStack() as stack:
        for runtime in dict.fromkeys(weight.handle.runtime for weight in weights):
            stack.enter_context(runtime.gradients_returned())
        return _call_plain(torch.autograd.grad, args, kwargs)


def _get(func: Any, args: tuple[Any, ...]) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute in _MATRIX_VIEWS and args[0].handle.group.size > 1:
        raise _needs_full(f"Tensor.{attribute}", [args[0]])
    if attribute == "data":
        return args[0].writable_shard()
    value = _call_plain(func, args, {})
    if attribute == "grad" and type(value) is torch.Tensor:
        # put there by autograd (a graphed layer returns its gradients to it)
        return cast("GTPWeight", args[0]).wrap_grad(value)
    return value


def _set(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    weight = cast("GTPWeight", args[0])
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "grad" and name == "__set__" and args[1] is not None:
        return weight.set_grad(args[1])
    if attribute == "data" and name == "__set__":
        return weight.set_data(args[1])
    return _call_plain(func, args, {})


def _check_elementwise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[GTPWeight]) -> None:
    writes_weight = name.endswith("_") and any(args[0] is weight for weight in weights)
    if name in _MOVES:
        _check_move(name, args, kwargs, weights)
    if torch.is_grad_enabled() and not writes_weight and any(_requires_grad(w) for w in weights):
        raise _needs_full(name, weights)
    handle = weights[0].handle
    shard_shape = handle.layout.shard_shape
    for tensor in _tensors_in((*args, *kwargs.values())):
        with _plain():
            shape, count = tuple(tensor.shape), tensor.numel()
        if (count == 1 and len(shape) == 0) or shape == shard_shape:
            continue
        hint = (
            "That is the logical shape: make the optimizer (and its state) after gtp.shard_model; "
            "to write a full weight use gtp.full_weights(model, write=True) or load_state_dict"
            if shape == handle.layout.logical_shape
            else "To compute with the full weight, gather it with weight.full_tensor()"
        )
        raise GTPValueError(
            f"{_label(weights)}: {name} between the shard {shard_shape} and a tensor {shape}; arithmetic on a shard "
            f"takes tensors of the shard's shape and scalars. {hint}"
        )


def _check_move(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[GTPWeight]) -> None:
    if not any(args[0] is weight for weight in weights):
        return
    with _plain():
        source = args[0].device
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
            f"{_label(weights)}: moving a sharded weight from {source} to {target} would leave its runtime behind. "
            "Move the model before gtp.shard_model; to look at the shard elsewhere use weight.detach().to(...)"
        )


def _in_place_or_not(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[GTPWeight]
) -> Any:
    if name.endswith("_") or "out" in kwargs:
        # see [Note: no stale reads]
        for weight in weights:
            weight.handle.runtime.before_write(weight.handle.group)
        result = _call_plain(func, args, kwargs)
        for weight in weights:
            weight.clear_padding()
        return result
    return _call_plain(func, args, kwargs)


def _call_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _plain():
        return func(*args, **kwargs)


def _needs_full(name: str, weights: list[GTPWeight]) -> UnsupportedError:
    handle = weights[0].handle
    return UnsupportedError(
        f"{_label(weights)}: {name} needs the full weight {handle.layout.logical_shape}, and this rank holds the "
        f"shard {handle.layout.shard_shape}. Gather it with weight.full_tensor(), use F.linear or F.embedding, or, to "
        "work on the shard itself, weight.detach()"
    )


def require_leader(weight: GTPWeight) -> None:
    """A weight used by itself must lead its group.

    Raises:
        GTPStateError: it is a later member of a group that is gathered together.
    """
    if weight.handle.position != 0:
        leader = weight.handle.group.members[0].name
        raise GTPStateError(
            f"{weight.handle.name}: it is gathered together with {leader}, which answers for the group; "
            "use the group as a whole (gtp.ops.grouped_linear), or shard the weights one by one"
        )


def _requires_grad(weight: torch.Tensor) -> bool:
    with _plain():
        return weight.requires_grad


def _label(weights: list[GTPWeight]) -> str:
    return f"sharded weight {weights[0].handle.name!r}"


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)

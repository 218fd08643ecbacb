"""What torch functions may do to a shard: a `GTPWeight`, or `ShardRows` that came from one.

[Note: one shard is not the weight] A function of a shard is let through only if its answer, computed from this rank's
rows alone, is this rank's rows of the answer for the whole: arithmetic element by element, copies, and metadata. Norms
are those of the whole, by a collective. Whatever else torch has, or will have, raises: it would be a wrong number
without a word. So the lists here allow; nothing is listed to be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch

from gtp.errors import GTPValueError, UnsupportedError
from gtp.ops._common import refused_transform
from gtp.runtime.held import note_zeroing
from gtp.weights.askers import ASKED, is_collective, refuse_asker, refuse_collective, transform_level
from gtp.weights.norms import foreach_norm, vector_norm
from gtp.weights.shard_tensor import LocalShard, past_torch_function

plain_access = torch._C.DisableTorchFunctionSubclass

METADATA = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous element_size data_ptr is_floating_point
    is_complex is_signed is_conj is_neg is_inference is_same_size get_device untyped_storage storage_type
    _typed_storage storage requires_grad_ retain_grad is_shared is_pinned has_names names dense_dim sparse_dim
    _is_view __hash__ __len__ is_tensor is_storage is_set_to _has_compatible_shallow_copy_type
    """.split()
)

# New tensors with the shard's metadata; nothing of its values, nor of a seed.
_FACTORIES = frozenset(
    "zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full new_tensor new".split()
)

_ARITHMETIC = frozenset(
    """
    add sub subtract mul multiply div divide true_divide floor_divide rsub remainder fmod addcmul addcdiv lerp sqrt
    rsqrt square pow float_power neg negative positive sign sgn signbit abs absolute exp exp2 expm1 log log2 log10 log1p
    reciprocal maximum minimum fmax fmin clamp clamp_min clamp_max clip where masked_fill copysign nan_to_num
    sin cos tan asin acos atan atan2 sinh cosh tanh sigmoid relu erf erfc floor ceil round trunc frac hypot
    eq ne lt le gt ge isnan isinf isposinf isneginf isfinite isclose
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    copy zero fill constant clone detach alias to type type_as float half bfloat16 double bool int long cpu cuda
    contiguous as_subclass
    """.split()
)
_OPERATORS = frozenset(
    f"__{side}{name}__"
    for name in "add sub mul truediv div floordiv mod pow and or xor".split()
    for side in ("", "i", "r")
) | frozenset("__neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__".split())
ELEMENTWISE = _ARITHMETIC | _OPERATORS

# Views that are the shard's, if they have its shape.
_VIEWS = frozenset("view view_as reshape reshape_as expand expand_as flatten ravel unflatten".split())

_FUSED = frozenset(["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

_NORMS = frozenset([torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm])

_RANDOM = frozenset(
    "normal uniform random bernoulli cauchy exponential geometric log_normal rand_like randn_like randint_like".split()
)


def call_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` on shards as if they were plain tensors."""
    # not by `plain_access`, which takes twice as long; and not every C function takes an empty `kwargs`
    return past_torch_function(func, (), args, kwargs) if kwargs else past_torch_function(func, (), args)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def apply(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func`, some of whose arguments are shards, or raises. See [Note: one shard is not the weight].

    Raises:
        UnsupportedError: the function would need the full weight.
        GTPValueError: a tensor in the arithmetic does not go with the shard's shape.
    """
    if name in METADATA:
        if name in ASKED:
            refuse_asker(name, args)
        return call_plain(func, args, kwargs)
    if name.startswith("_foreach_") or name in _FUSED or name == _UNSCALE:
        return _on_lists(func, name, args, kwargs)
    if name == "type" and len(args) + len(kwargs) == 1:  # the name of the dtype, which errors of torch's own quote
        return call_plain(func, args, kwargs)
    tensors = tensors_in((*args, *kwargs.values()))
    shards = [t for t in tensors if isinstance(t, LocalShard)]
    shard = next((s for s in shards if not s.origin.is_whole), None)
    if shard is None:
        return _written(name, args, kwargs, shards, func)
    if name in _FACTORIES:
        return shard.local_state(call_plain(func, args, kwargs))
    if func in _NORMS and not shard.is_weight:
        return vector_norm(func, args, kwargs)
    if name == "__setitem__" and _is_mask(args[1], shard):  # `rows[rows > 0] = 1`
        return _written(name, args, kwargs, shards, func)
    base = name.rstrip("_") if not name.endswith("__") else name
    if base not in ELEMENTWISE and is_collective(func):
        for each in shards:
            refuse_collective(each, name, kwargs.get("group"))
        return _call_writing(func, name, args, kwargs, shards)
    if (base not in ELEMENTWISE and base not in _VIEWS) or _makes_graph(name, args, kwargs, shards):
        raise needs_full(func, name, shard)
    if base == "where" and len(args) + len(kwargs) == 1:  # indices of nonzero elements, which would be this rank's
        raise needs_full(func, name, shard)
    if base in _VIEWS:
        view = call_plain(func, args, kwargs)
        if view.shape != shard.origin.shape:
            raise needs_full(func, name, shard)
        return shard.local_state(view)
    if transform_level() is not None:
        refuse_transforms(name, args, kwargs)
    _require_shape(name, shard, tensors)
    result = _written(name, args, kwargs, shards, func)
    return result if name == "as_subclass" or writes(name, kwargs) else _remember(result, shard)


def refuse_transforms(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """A function was called with a shard while a transform of torch.func is active.

    Raises:
        UnsupportedError: always.
    """
    shard = next(t for t in tensors_in((*args, *kwargs.values())) if isinstance(t, LocalShard))
    raise refused_transform(f"{shard.label} was used by {name} inside a transform of torch.func (grad, vmap, ...)")


def _makes_graph(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shards: Sequence[LocalShard]) -> bool:
    """Whether autograd would record this for a weight, whose gradient is not computed from its shard."""
    if not torch.is_grad_enabled():
        return False
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    writes_weight = writes(name, {}) and any(target is shard for shard in shards)
    with plain_access():
        return not writes_weight and any(s.is_weight and s.requires_grad for s in shards)  # type: ignore[attr-defined]


def _is_mask(index: Any, shard: LocalShard) -> bool:
    with plain_access():
        return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.shape == shard.origin.shape


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function of this name writes one of its arguments."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or kwargs.get("out") is not None


def _written_to(args: tuple[Any, ...], kwargs: dict[str, Any], shards: Sequence[LocalShard]) -> Sequence[LocalShard]:
    """Of the shards among the arguments, those that the call writes: the others are only looked at."""
    out = kwargs.get("out")
    if out is None and not args:
        return shards
    return [t for t in tensors_in([args[0] if out is None else out]) if isinstance(t, LocalShard)]


def _on_lists(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of several lists of tensors, whose i-th entries belong together: multi-tensor and fused optimizers.

    What is said of a list is said of it as a whole where that is possible: these calls are what an optimizer costs.
    """
    columns: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, (list, tuple)) and _holds_tensors(v)]
    shards = [_shards_of(column) for column in columns]
    every = list(chain.from_iterable(shards))
    shard = next((s for s in every if not s.origin.is_whole), None)
    written: Iterable[LocalShard] = ()
    if name.endswith("_"):
        written = every if name in _FUSED or not args else chain.from_iterable(shards[:1])
    if shard is None:
        return _call_writing(func, name, args, kwargs, written)
    if func is torch._foreach_norm and not any(s.is_weight for s in every):
        return foreach_norm(*args, **kwargs)
    if name.startswith("_foreach_") and name.removeprefix("_foreach_").rstrip("_") not in ELEMENTWISE:
        raise needs_full(func, name, shard)
    leaders = _leaders(columns, shards)
    _require_rows(name, leaders, columns, shards)
    result = _call_writing(func, name, args, kwargs, written)
    if name == _UNSCALE:
        _agree_on_infinity(args[0], args[1])
    if name.endswith("_") or not isinstance(result, (list, tuple)):
        return result
    return [v if s is None or s.origin.is_whole else s.new_state(v) for v, s in zip(result, leaders, strict=True)]


def _holds_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], torch.Tensor)


def _shards_of(column: Sequence[Any]) -> Sequence[LocalShard]:
    """The shards in a list; the list itself where it holds nothing else."""
    kinds = set(map(type, column))
    shards = [kind for kind in kinds if issubclass(kind, LocalShard)]
    if len(shards) == len(kinds):
        return column
    return [t for t in column if isinstance(t, LocalShard)] if shards else []


def _leaders(columns: Sequence[Sequence[Any]], shards: Sequence[Sequence[LocalShard]]) -> Sequence[LocalShard | None]:
    """The first shard of each row."""
    if shards[0] is columns[0]:
        return shards[0]
    return [next((t for t in row if isinstance(t, LocalShard)), None) for row in zip(*columns, strict=False)]


def _require_rows(
    name: str,
    leaders: Sequence[LocalShard | None],
    columns: Sequence[Sequence[Any]],
    shards: Sequence[Sequence[LocalShard]],
) -> None:
    """As `_require_shape`, of each row."""
    origins = [None if leader is None else leader.origin for leader in leaders]
    for column, found in zip(columns, shards, strict=True):
        if found is column and [s.origin for s in found] == origins:
            continue
        with plain_access():
            shapes = [tensor.shape for tensor in column]
        for leader, shape, tensor in zip(leaders, shapes, column, strict=False):
            if leader is not None and shape and shape != leader.origin.shape:
                _require_shape(name, leader, [tensor])


def _require_shape(name: str, shard: LocalShard, tensors: Sequence[torch.Tensor]) -> None:
    wanted = shard.origin.shape
    with plain_access():
        shapes = [tensor.shape for tensor in tensors]
    for shape in shapes:
        if shape == wanted or not shape or _broadcasts(shape, wanted):
            continue
        hint = (
            "That is the logical shape: make the optimizer (and its state) after gtp.shard_model; "
            "to write a full weight use gtp.full_weights(model, write=True) or load_state_dict"
            if shape == shard.origin.layout.logical_shape
            else "To compute with the full weight, gather it with full_tensor()"
        )
        raise GTPValueError(
            f"{shard.label}: {name} between the shard {wanted} and a tensor {tuple(shape)}; arithmetic takes "
            f"tensors of the shard's shape and what broadcasts to it. {hint}"
        )


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether each row of the shard meets the same values: a tensor with rows of its own must have them all."""
    if len(shape) > len(wanted):
        return False
    if len(shape) == len(wanted) and shape[0] not in (1, wanted[0]):
        return False
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return all(mine in (1, whole) for mine, whole in pairs)


def _written(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shards: Sequence[LocalShard], func: Callable[..., Any]
) -> Any:
    """Calls `func`; the weights whose memory it writes know before and after."""
    written = _written_to(args, kwargs, shards) if writes(name, kwargs) else ()
    return _call_writing(func, name, args, kwargs, written)


def _call_writing(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: Iterable[LocalShard]
) -> Any:
    owners = [shard.memory_of() for shard in written if shard.memory_of is not None]
    weights = [weight for weight in owners if weight is not None]
    for runtime in dict.fromkeys([weight.handle.runtime for weight in weights]):
        runtime.before_write([weight.handle.group for weight in weights if weight.handle.runtime is runtime])
    result = call_plain(func, args, kwargs)
    for weight in weights:
        if weight.origin.has_padding:
            weight.clear_padding()
    note_zeroing(name, args, kwargs)
    return result


def _remember(result: Any, shard: LocalShard | None) -> Any:
    """What is computed from a shard element by element is as much this rank's rows as the shard was."""
    if shard is None or not isinstance(result, torch.Tensor) or isinstance(result, LocalShard):
        return result
    return shard.local_state(result)


def needs_full(func: Any, name: str, shard: LocalShard) -> UnsupportedError:
    """The error for whatever would need the full weight, with what to use."""
    layout = shard.origin.layout
    if name.rstrip("_") in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init":
        return UnsupportedError(
            f"{shard.label}: {name} would compute this rank's rows from the shard's shape and a seed of its own, and "
            "the full weight would depend on the number of ranks. Initialize the model before gtp.shard_model, or "
            "build it on the meta device and pass init=; to set values later use gtp.full_weights(model, write=True)"
        )
    if shard.is_weight:
        use = (
            "use F.linear or F.embedding, have it gathered while the forward of its own module runs, with "
            "gtp.shard_model(unshard=...), or, to work on the shard itself, take weight.shard. What is read elsewhere, "
            "by another module or method, in a generator, or where a part of that forward is recomputed, stays "
            "replicated with exclude="
        )
    else:
        use = (
            "use torch.linalg.vector_norm for the norm of the whole (gtp.clip_grad_norm_ for that of all gradients), "
            "or, for this rank's rows alone, .shard"
        )
    return UnsupportedError(
        f"{shard.label}: {name} needs the full weight {layout.logical_shape}, and this rank holds the "
        f"shard {layout.shard_shape}. Gather it with {'weight' if shard.is_weight else ''}.full_tensor(), {use}. "
        "Optimizers that look beyond elements (LBFGS, Adafactor, Shampoo) cannot work on shards: take an "
        "elementwise one (SGD, Adam, AdamW), or gtp.optim.Muon, which gathers matrices"
    )


def _agree_on_infinity(grads: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
    groups = dict.fromkeys(grad.origin.process_group for grad in grads if isinstance(grad, LocalShard))
    for process_group in groups:
        if process_group.size() > 1:
            torch.distributed.all_reduce(found_inf, op=torch.distributed.ReduceOp.MAX, group=process_group)

"""`ShardGrad`: the gradient of a shard, which answers for the whole weight where a local answer would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import UnsupportedError
from gtp.weights.layout import ShardLayout
from gtp.weights.shard_tensor import CheckpointableShard, ShardOrigin, ShardState, is_whole

_plain = torch._C.DisableTorchFunctionSubclass

_NORMS = frozenset([torch.linalg.vector_norm, torch.norm, torch.Tensor.norm])
_REDUCTIONS = frozenset(
    """
    sum mean std var prod max min amax amin argmax argmin median logsumexp dot vdot inner all any count_nonzero
    """.split()
)
# What mixes rows, or loses which rows they are: whole-matrix optimizers begin with one of these.
_MATRIX = frozenset(
    """
    matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm t transpose swapaxes swapdims permute movedim
    einsum tensordot kron outer ger svd svdvals qr eigh cholesky inv pinv lstsq solve matrix_norm matrix_power
    """.split()
)
_MATRIX_VIEWS = frozenset(["T", "mT", "H", "mH"])
_RESHAPES = frozenset(["view", "reshape", "flatten", "ravel", "view_as", "reshape_as", "unflatten"])
_LOCAL_TENSORS = frozenset(["detach", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_empty"])


class ShardGrad(CheckpointableShard, torch.Tensor):
    """This rank's rows of a weight's gradient `[shard_rows, *trailing]`, as found in `GTPWeight.grad`.

    Arithmetic is local, as optimizers want it. Norms (`torch.linalg.vector_norm`, `torch.norm`, `Tensor.norm`,
    `torch._foreach_norm`, so also `torch.nn.utils.clip_grad_norm_`) are those of the whole gradient without padding,
    the same on all ranks, and collective. Gradient unscaling of `torch.amp.GradScaler` agrees over ranks whether a
    value was infinite. Other reductions raise, and so does what needs the whole matrix, such as a product or a
    transpose, also of what was computed from a gradient element by element. `grad.detach()` is the local tensor for
    who wants it.
    """

    _origin: ShardOrigin

    @staticmethod
    def wrap(grad: torch.Tensor, origin: ShardOrigin) -> ShardGrad:
        """A `ShardGrad` over the storage of `grad`."""
        with _plain():
            wrapped = grad.detach().as_subclass(ShardGrad)
        wrapped._origin = origin
        return wrapped

    @property
    def _process_group(self) -> dist.ProcessGroup:
        return self._origin.process_group

    def valid_rows(self) -> torch.Tensor:
        """The rows that are not padding, a plain local tensor `[valid_rows, *trailing]`."""
        with _plain():
            return self.as_subclass(torch.Tensor)[: self._origin.layout.valid_rows]

    def checkpoint_part(self) -> tuple[torch.Tensor, ShardLayout]:
        """The local tensor and its layout, for `torch.distributed.checkpoint`."""
        with _plain():
            return self.detach().as_subclass(torch.Tensor), self._origin.layout

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _NORMS and _shards_of(args[:1]):
            return _vector_norm(args[0], *_norm_order(func, args, kwargs))
        if func is torch._foreach_norm:
            return _foreach_norm(*args, **kwargs)
        if name in _REDUCTIONS and _shards_of(args[:1]) and args[0]._process_group.size() > 1:
            raise UnsupportedError(
                f"{args[0]._origin.name}: {name} of a shard, or of its gradient, would be this rank's part only. For a "
                "norm of the whole use torch.linalg.vector_norm, for that of all gradients gtp.clip_grad_norm_; for "
                f"this rank's rows use .detach().{name}(...)"
            )
        shard = next((a for a in args if isinstance(a, ShardGrad)), None)
        if shard is not None:
            name = _refuse_whole_matrix(func, name, shard)
        with _plain():
            result = func(*args, **kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            _agree_on_infinity(args[0], args[1])
        if shard is not None:
            return _remember(result, name, shard)
        if isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple)):
            return [_remember(r, name, a) for r, a in zip(result, args[0], strict=True)]
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _refuse_whole_matrix(func: Any, name: str, shard: ShardGrad) -> str:
    """The name of `func`, or of the attribute that it gets."""
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        refused = name in _MATRIX_VIEWS
    else:
        refused = name.removeprefix("linalg_") in _MATRIX or name.removesuffix("_") in _MATRIX
    if refused and shard._process_group.size() > 1:
        raise _needs_all_rows(name, shard)
    return name


def _remember(result: Any, name: str, shard: Any) -> Any:
    """What is computed from a gradient element by element is as much a shard as the gradient was."""
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name == "as_subclass" or not isinstance(shard, ShardGrad) or not isinstance(result, torch.Tensor):
        return result
    layout = shard._origin.layout
    if tuple(result.shape) != layout.shard_shape:
        if name in _RESHAPES and layout.group_size > 1:
            raise _needs_all_rows(name, shard)
        return result
    if name in _LOCAL_TENSORS or name == "data":
        return result if is_whole(layout) or isinstance(result, ShardState) else ShardState.wrap(result, shard._origin)
    return ShardGrad.wrap(result, shard._origin)


def _needs_all_rows(name: str, shard: ShardGrad) -> UnsupportedError:
    origin = shard._origin
    return UnsupportedError(
        f"{origin.name}: {name} of its gradient needs all rows {origin.layout.logical_shape}, and this rank holds "
        f"{origin.layout.shard_shape}. Optimizers over whole matrices must gather them: gtp.optim.Muon does. For this "
        f"rank's rows alone use grad.detach()"
    )


def global_power_sums(
    shards: Iterable[tuple[torch.Tensor, dist.ProcessGroup]], order: float, device: torch.device
) -> list[torch.Tensor]:
    """Per tensor the sum over ranks of `|x|^order` (infinite order: the maximum), fp32 0-d; one collective per group.

    Args:
        shards: Plain local tensors without padding, with the group over which each is sharded; same order on all ranks.
    """
    shards = list(shards)
    sums: list[torch.Tensor] = []
    batches: dict[dist.ProcessGroup, list[int]] = {}
    for index, (local, process_group) in enumerate(shards):
        sums.append(_local_power_sum(local, order).to(device))
        batches.setdefault(process_group, []).append(index)
    for process_group, indices in batches.items():
        if process_group.size() == 1:
            continue
        stacked = torch.stack([sums[i] for i in indices])
        dist.all_reduce(
            stacked, op=dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM, group=process_group
        )
        for index, total in zip(indices, stacked, strict=True):
            sums[index] = total
    return sums


def root(power_sum: torch.Tensor, order: float) -> torch.Tensor:
    """The norm that belongs to a power sum."""
    return power_sum if order in (float("inf"), 0.0) else power_sum ** (1.0 / order)


def _local_power_sum(local: torch.Tensor, order: float) -> torch.Tensor:
    wide = torch.promote_types(local.dtype, torch.float32)
    if local.numel() == 0:
        return torch.zeros((), dtype=wide, device=local.device)
    norm: torch.Tensor = torch.linalg.vector_norm(local, order, dtype=wide)
    return norm if order in (float("inf"), 0.0) else norm**order


def _shards_of(values: Iterable[Any]) -> bool:
    return any(isinstance(value, ShardGrad) for value in values)


def _norm_order(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, torch.dtype | None]:
    allowed = {"ord", "p", "dtype", "input", "x"}
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
    extra = [k for k, v in kwargs.items() if k not in allowed and v not in (None, False)]
    if len(args) > 2 or extra or (isinstance(order, str) and order != "fro"):
        raise UnsupportedError(
            f"{func.__name__} of a sharded gradient is the norm of all its elements: no dim, keepdim or matrix norm "
            f"(given: {extra or args[1:]}). Use grad.detach() for this rank's rows"
        )
    return (2.0 if order in ("fro", None) else float(order)), kwargs.get("dtype")


def _vector_norm(grad: ShardGrad, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    local = grad.valid_rows()
    (total,) = global_power_sums([(local, grad._process_group)], order, local.device)
    return root(total, order).to(dtype or local.dtype)


def _foreach_norm(tensors: Any, ord: float = 2.0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    order = float(ord)
    norms: list[torch.Tensor | None] = [None] * len(tensors)
    plain = [i for i, t in enumerate(tensors) if not isinstance(t, ShardGrad)]
    if plain:
        for i, norm in zip(plain, torch._foreach_norm([tensors[i] for i in plain], order, dtype=dtype), strict=True):
            norms[i] = norm
    sharded = [(i, t) for i, t in enumerate(tensors) if isinstance(t, ShardGrad)]
    locals_ = [t.valid_rows() for _, t in sharded]
    groups = [t._process_group for _, t in sharded]
    totals = global_power_sums(zip(locals_, groups, strict=True), order, locals_[0].device)
    for (i, _), local, total in zip(sharded, locals_, totals, strict=True):
        norms[i] = root(total, order).to(dtype or local.dtype)
    return [norm for norm in norms if norm is not None]


def _agree_on_infinity(grads: Iterable[torch.Tensor], found_inf: torch.Tensor) -> None:
    groups = dict.fromkeys(grad._process_group for grad in grads if isinstance(grad, ShardGrad))
    for process_group in groups:
        if process_group.size() > 1:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=process_group)

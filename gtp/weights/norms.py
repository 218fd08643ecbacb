"""Norms of whole weights and gradients, of which each rank holds rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import UnsupportedError
from gtp.weights.shard_tensor import LocalShard

_TENSOR_NAMES = ("input", "x", "A", "self")


def norm_of(values: torch.Tensor, order: float, dim: int | None = None) -> torch.Tensor:
    """The `order`-norm of `values`, over all of it or along `dim`, in fp32 (fp64 for fp64). Plain and local.

    High powers of small or large numbers leave the range of fp32 long before their root does, so orders other than 0,
    1, 2 and infinity are taken of values scaled by the largest. Infinite and NaN values give infinite and NaN norms.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    if values.numel() == 0:
        return torch.zeros(() if dim is None else values.shape[1:], dtype=wide, device=values.device)
    if order in (0.0, 1.0, 2.0, math.inf):
        norm: torch.Tensor = torch.linalg.vector_norm(values, order, dim, dtype=wide)
        return norm
    largest = torch.linalg.vector_norm(values, math.inf, dim, dtype=wide)
    scale = torch.where(torch.isfinite(largest) & (largest > 0), largest, torch.ones_like(largest))
    scaled: torch.Tensor = torch.linalg.vector_norm(values.to(wide) / scale, order, dim)
    return scaled * scale


def global_norms(
    shards: Iterable[tuple[torch.Tensor, dist.ProcessGroup]], order: float, device: torch.device
) -> list[torch.Tensor]:
    """Per tensor the norm of all ranks' rows, 0-d, fp32 (fp64 for fp64); one collective per group.

    Args:
        shards: Plain local tensors without padding, with the group over which each is sharded; same order on all ranks.
        order: At least 0.
    """
    norms: list[torch.Tensor] = []
    batches: dict[dist.ProcessGroup, list[int]] = {}
    for index, (local, process_group) in enumerate(shards):
        norms.append(norm_of(local, order).to(device))
        if process_group.size() > 1:
            batches.setdefault(process_group, []).append(index)
    for process_group, indices in batches.items():
        stacked = torch.stack([norms[i].to(torch.promote_types(norms[i].dtype, torch.float32)) for i in indices])
        for index, total in zip(indices, _over_ranks(stacked, order, process_group), strict=True):
            norms[index] = total
    return norms


def _over_ranks(norms: torch.Tensor, order: float, process_group: dist.ProcessGroup) -> torch.Tensor:
    """Norms `[n]` of every rank's rows to norms of all rows."""
    if order in (0.0, 1.0, 2.0):
        sums = norms.square() if order == 2.0 else norms
        dist.all_reduce(sums, group=process_group)
        return sums.sqrt() if order == 2.0 else sums
    # not a maximum on the wire, where a NaN may lose
    every = norms.new_empty((process_group.size() * norms.numel(),))
    dist.all_gather_into_tensor(every, norms, group=process_group)
    return norm_of(every.view(process_group.size(), -1), order, 0)


def vector_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`torch.linalg.vector_norm` and its older names: the norm of the whole. Collective.

    Raises:
        UnsupportedError: a dim, keepdim, out or matrix norm is asked for.
    """
    shard = args[0] if args else next(kwargs[name] for name in _TENSOR_NAMES if name in kwargs)
    order, dtype = _order(func, shard, args, kwargs)
    local = shard.valid_rows()
    (norm,) = global_norms([(local, shard.origin.process_group)], order, local.device)
    return norm.to(dtype or local.dtype)


def foreach_norm(
    tensors: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """`torch._foreach_norm`, with the norms of the whole for shards."""
    order = float(ord)
    norms: dict[int, torch.Tensor] = {}
    plain = [i for i, t in enumerate(tensors) if not isinstance(t, LocalShard)]
    if plain:
        local_norms = torch._foreach_norm([tensors[i] for i in plain], order, dtype=dtype)
        norms.update(zip(plain, local_norms, strict=True))
    sharded = [(i, t) for i, t in enumerate(tensors) if isinstance(t, LocalShard)]
    parts = [(t.valid_rows(), t.origin.process_group) for _, t in sharded]
    totals = global_norms(parts, order, parts[0][0].device)
    for (i, _), (local, _), total in zip(sharded, parts, totals, strict=True):
        norms[i] = total.to(dtype or local.dtype)
    return [norms[i] for i in range(len(tensors))]


def _order(
    func: Callable[..., Any], shard: LocalShard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, torch.dtype | None]:
    given = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    known = ("ord", "p", "dtype", *_TENSOR_NAMES)
    extra = [k for k, v in kwargs.items() if k not in known and v is not None and v is not False]  # dim=0 is a dim
    a_matrix_norm = isinstance(given, str) and given != "fro"
    if func is torch.linalg.norm and given is not None:
        a_matrix_norm = isinstance(given, str) or len(shard.origin.layout.logical_shape) > 1
    order = 2.0 if given is None or isinstance(given, str) else float(given)
    if len(args) > 2 or extra or a_matrix_norm or order < 0:
        raise UnsupportedError(
            f"{shard.label}: {func.__name__} is the norm of all elements of the whole here: no dim, keepdim, out, "
            f"negative order or matrix norm (given: {extra or args[1:] or given}). Gather the whole with "
            ".full_tensor(), or take this rank's rows alone with .shard. Optimizers that need norms of rows or columns "
            "(Adafactor) cannot work on shards"
        )
    return order, kwargs.get("dtype")

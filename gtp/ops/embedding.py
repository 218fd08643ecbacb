"""`embedding`: `F.embedding` over a table of which this rank may hold a shard only."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from gtp.errors import UnsupportedError
from gtp.ops._common import (
    apply_of,
    finish_wgrads,
    is_managed,
    is_surely_plain,
    is_wanted,
    plain_access,
    refuse_distributed,
    refuse_double_backward,
    refused_input,
    wgrad_buffers,
)
from gtp.ops.compilers import never_compiled, outside_graphs
from gtp.protocol import describe_weight, is_distributed_weight, materialize_weight_for_forward


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of the full table: bit for bit `F.embedding` on it. Arguments are named and ordered as there.

    The table is gathered for the lookup and let go. The gradient is dense, the full table's, written into the
    implementer's buffer; nothing is gathered in backward.

    Args:
        input: Indices `[*]`, integers.
        weight: Distributed `[shard_rows, dim]`, this rank's rows of the full `[rows, dim]`; or plain `[rows, dim]`.
        padding_idx: This row gets no gradient.
        max_norm, norm_type: As in `F.embedding`; plain weights only.
        scale_grad_by_freq: As in `F.embedding`; frequencies are those of this rank's indices.
        sparse: As in `F.embedding`; plain weights only.

    Returns:
        `[*, dim]`, in the full table's dtype.

    Raises:
        UnsupportedError: `max_norm` or `sparse` with a distributed weight; double backward.
    """
    if is_surely_plain(weight):
        refuse_distributed("embedding", input=input)
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _managed_embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def _refuse_writes_and_sparse(weight: torch.Tensor, max_norm: float | None, sparse: bool) -> None:
    if max_norm is not None:
        raise UnsupportedError(
            f"{describe_weight(weight)}: embedding with max_norm={max_norm} rescales rows of the table in forward, and "
            "a gathered table is a copy. Use max_norm=None, or leave this weight unsharded "
            "(gtp.shard_model(exclude=...))"
        )
    if sparse:
        raise UnsupportedError(
            f"{describe_weight(weight)}: embedding with sparse=True gives a sparse gradient, which cannot be "
            "reduce-scattered by rows. Use sparse=False, or leave this weight unsharded (gtp.shard_model(exclude=...))"
        )


@outside_graphs
def _managed_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> torch.Tensor:
    refuse_distributed("embedding", input=ids)
    if is_distributed_weight(weight):
        _refuse_writes_and_sparse(weight, max_norm, sparse)
    elif not is_managed(weight) or max_norm is not None or sparse:
        return F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    with plain_access():
        dims, trainable = weight.dim(), weight.requires_grad
    if dims != 2:
        raise UnsupportedError(f"{describe_weight(weight)}: embedding takes a 2-d table [rows, dim]")
    if torch.is_grad_enabled() and trainable:
        if ids.layout is not torch.strided or ids.is_nested:
            raise refused_input(weight, ids)
        return _apply(ids, weight, padding_idx, scale_grad_by_freq)
    with torch.no_grad():  # a full table that requires grad would be kept by its graph
        (full,) = materialize_weight_for_forward([weight])
        return F.embedding(ids, full, padding_idx)


class _Embedding(torch.autograd.Function):
    """
    ids `[*]`, weight shard `[shard_rows, dim]` (full W `[rows, dim]`), y and dy `[*, dim]`.

    forward   y = W[ids]
    wgrad     row r: the sum of dy over the places where ids == r; zero for padding_idx

    Saved: ids; the weight itself as an attribute ([Note: weights stay out of save_for_backward] in gtp/ops/_common.py).
    """

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, scale_grad_by_freq: bool
    ) -> torch.Tensor:
        (full,) = materialize_weight_for_forward([weight])
        y = F.embedding(ids, full, padding_idx)
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.rows = full.shape[0]
        ctx.padding_idx = -1 if padding_idx is None else padding_idx % max(ctx.rows, 1)
        ctx.scale_grad_by_freq = scale_grad_by_freq
        return y

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.weight
        refuse_double_backward([weight])
        if not is_wanted(ctx, 1):
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        (buffer,) = wgrad_buffers([weight], ctx.rows)
        wgrad = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.rows, ctx.padding_idx, ctx.scale_grad_by_freq)
        if buffer is not None:
            wgrad = buffer.copy_(wgrad)
        (grad,) = finish_wgrads([weight], [wgrad])
        return None, grad, None, None


_apply: Final = apply_of(_Embedding)

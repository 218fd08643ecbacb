"""`linear`: `F.linear` over a weight of which this rank may hold a shard only."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from gtp.errors import GTPValueError, UnsupportedError
from gtp.ops._common import (
    apply_of,
    as_rows,
    autocast_dtype,
    autocast_to,
    check_dtype,
    check_rows,
    finish_wgrads,
    is_managed,
    is_surely_plain,
    is_wanted,
    main_grad_dtype,
    plain_access,
    refuse_distributed,
    refuse_double_backward,
    refused_input,
    wgrad_buffers,
    write_wgrad,
)
from gtp.ops.compilers import never_compiled, outside_graphs
from gtp.ops.versions import ShardVersions
from gtp.protocol import describe_weight, materialize_weight_for_backward, materialize_weight_for_forward


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`y = input @ full.t() + bias`: bit for bit `F.linear` on the full weight, forward and backward, autocast
    included.

    Arguments are named and ordered as in `F.linear`. For backward of a distributed weight the input and the shard are
    kept, never the full weight. Backward computes the wgrad first and hands it over; only then does it re-gather the
    weight for the dgrad, so the gather has one more GEMM to hide behind, and the reduction runs beside the dgrad.
    Nothing is re-gathered where the input needs no gradient, nothing is reduced where the weight is frozen.

    A plain weight with `main_grad` and `grad_added_to_main_grad` gets its wgrad added there, as Megatron and
    Transformer Engine do; every other plain weight takes `F.linear` itself.

    Args:
        input: `[*, in]`.
        weight: Distributed `[shard_rows, in]`, this rank's rows of the full `[out, in]`; or plain `[out, in]`.
        bias: `[out]`, plain, replicated.

    Returns:
        `[*, out]`, in the input's dtype; in autocast's dtype under autocast.

    Raises:
        GTPValueError: shapes or dtypes of input and weight do not go together.
        UnsupportedError: the weight is not 2-d; input or bias is a distributed weight; double backward.
        GTPStateError: in backward, the weight was written after the forward.
    """
    if is_surely_plain(weight):
        refuse_distributed("linear", input=input, bias=bias)
        return F.linear(input, weight, bias)
    return _managed_linear(input, weight, bias)


@outside_graphs
def _managed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    refuse_distributed("linear", input=x, bias=bias)
    if not is_managed(weight):
        return F.linear(x, weight, bias)
    with plain_access():
        shape, trainable = weight.shape, weight.requires_grad
    check_shapes(x, weight, shape)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = autocast_to(x, dtype)
        bias = None if bias is None else autocast_to(bias, dtype)
    if torch.is_grad_enabled() and (trainable or x.requires_grad or (bias is not None and bias.requires_grad)):
        if x.layout is not torch.strided or x.is_nested:
            raise refused_input(weight, x)
        return _apply(x, weight, bias, dtype)
    with torch.no_grad():  # a full weight that requires grad would be kept by its graph
        return gemm(x, weight, bias, dtype, trainable and dtype is None)  # autocast's copy has no grad here


def check_shapes(x: torch.Tensor, weight: torch.Tensor, shape: torch.Size) -> None:
    """Whether `x` can meet a weight of this shard shape, found out before any collective.

    Raises:
        UnsupportedError: the weight is not a matrix.
        GTPValueError: `x` has another number of features.
    """
    if len(shape) != 2:
        raise UnsupportedError(f"{describe_weight(weight)}: linear takes a 2-d weight [out, in]")
    if x.dim() == 0 or x.size(-1) != shape[1]:  # some nested tensors have no shape
        raise GTPValueError(
            f"{describe_weight(weight)}: linear takes an input [*, {shape[1]}], got {tuple(x.shape)}; the last dim "
            "must be the weight's in_features"
        )


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
    trainable: bool,
) -> torch.Tensor:
    """The forward product with the full weight, which is let go on return.

    Args:
        dtype: Autocast's, to which the full weight is cast.
        trainable: Whether the plain weight of the unsharded model would require grad.
    """
    (gathered,) = materialize_weight_for_forward([weight])
    full = gathered if dtype is None else autocast_to(gathered, dtype)
    check_dtype(weight, full, x)
    if trainable and not _flattens(x):
        y = torch.mm(as_rows(x), full.t()).view(*x.shape[:-1], full.shape[0])
        return y if bias is None else y.add_(bias)
    return F.linear(x, full if trainable else full.detach(), bias)


def _flattens(x: torch.Tensor) -> bool:
    """Whether the leading dims of `x` are one without a copy.

    Where they are not, torch's `F.linear` still makes one product of it if the weight requires grad, and a batch of
    products if not, which round differently. This op does as torch does, and decides by the shard's `requires_grad`,
    because the full weight's flag is the implementer's business.
    """
    if x.dim() <= 2 or x.is_contiguous():
        return True
    shape, stride = x.shape, x.stride()
    return x.numel() == 0 or all(stride[i] == stride[i + 1] * shape[i + 1] for i in range(x.dim() - 2))


class _Linear(torch.autograd.Function):
    """
    x `[*, in]`, weight shard `[shard_rows, in]` (full W `[out, in]`), bias b `[out]`, y and dy `[*, out]`;
    X and DY are x and dy with leading dims flattened, `[tokens, in]` and `[tokens, out]`.

    forward   y = x W^T + b
    wgrad     DY^T X, written into the implementer's buffer
    dbias     sum of DY over tokens
    dgrad     DY W, W gathered again

    Saved: x if the weight is trainable; the weight itself as an attribute ([Note: weights stay out of
    save_for_backward]).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        y = gemm(x, weight, bias, dtype, need_weight)
        ctx.weight = weight
        if need_weight:
            ctx.save_for_backward(x)
        ctx.autocast = dtype is not None
        if need_x:
            ctx.versions = ShardVersions([weight])
            ctx.x_shape = x.shape
            ctx.transposed = _is_transposed(x)
            ctx.batched = not need_weight and not _flattens(x)
        if need_bias:
            # torch fuses the bias into these products; elsewhere it adds it, and sums dy in dy's own layout.
            ctx.bias_fused = x.dim() == 2 or x.is_contiguous()
        return y.data if y._is_view() else y  # [Note: outputs are no views]

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.weight
        refuse_double_backward([weight])
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        if need_x:
            ctx.versions.check([weight])
        dy_rows = as_rows(dy)
        dx = dweight = dbias = None
        if need_weight and is_wanted(ctx, 1):
            (x,) = ctx.saved_tensors
            dweight = weight_gradient(weight, dy_rows, as_rows(x), rounded=ctx.autocast)
        if need_bias:
            dbias = bias_gradient(dy, dy_rows, ctx.bias_fused)
        if need_x:
            if ctx.batched:
                dy_rows = dy.reshape(-1, *dy.shape[-2:])
            dx = input_gradient(weight, dy_rows, ctx.transposed)
            if len(ctx.x_shape) != 2:
                dx = dx.view(ctx.x_shape)
        return dx, dweight, dbias, None


_apply: Final = apply_of(_Linear)


def weight_gradient(
    weight: torch.Tensor, dy_rows: torch.Tensor, x_rows: torch.Tensor, *, rounded: bool
) -> torch.Tensor | None:
    """The wgrad, handed over; returns what autograd is given.

    Args:
        dy_rows: `[tokens, out]`.
        x_rows: `[tokens, in]`.
        rounded: Keep the GEMM's result in the operands' dtype, as autocast does, even if the buffer is wider.
    """
    (buffer,) = wgrad_buffers([weight], dy_rows.shape[1])
    wide = None if rounded else main_grad_dtype(weight) if buffer is None else buffer.dtype
    wgrad = write_wgrad(dy_rows, x_rows, buffer, wide)
    (grad,) = finish_wgrads([weight], [wgrad])
    return grad


def bias_gradient(dy: torch.Tensor, dy_rows: torch.Tensor, fused: bool) -> torch.Tensor:
    """`[out]`: dy summed over tokens, in the order that torch's own backward uses."""
    if fused:
        return dy_rows.sum(0)
    return dy.sum(tuple(range(dy.dim() - 1))) if dy.dim() > 1 else dy


def input_gradient(weight: torch.Tensor, dy: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """The dgrad `[tokens, in]`, from the weight gathered again; `[batch, tokens, in]` for a batch of products."""
    (gathered,) = materialize_weight_for_backward([weight])
    check_rows([weight], [gathered], dy.shape[-1], "materialize_group_for_backward")
    full = autocast_to(gathered, dy.dtype)
    if dy.dim() == 3:
        return torch.bmm(dy, full.expand(dy.shape[0], *full.shape))
    if transposed:
        return torch.mm(full.t(), dy.t()).t()
    return torch.mm(dy, full)


def _is_transposed(x: torch.Tensor) -> bool:
    """Whether torch's backward computes this matrix's gradient by the transposed product, in the transposed layout."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]

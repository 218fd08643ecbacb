"""`layernorm_linear`: LayerNorm or RMSNorm, then `linear`, keeping one activation for backward and not two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F

from gtp.errors import GTPValueError
from gtp.ops._common import (
    apply_of,
    as_rows,
    autocast_dtype,
    autocast_to,
    is_managed,
    is_surely_plain,
    is_wanted,
    plain_access,
    refuse_distributed,
    refuse_double_backward,
    refused_input,
)
from gtp.ops.compilers import never_compiled, outside_graphs
from gtp.ops.linear import bias_gradient, check_shapes, gemm, input_gradient, linear, weight_gradient
from gtp.ops.versions import ShardVersions

Normalization = Literal["LayerNorm", "RMSNorm"]


def norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    normalization: Normalization = "LayerNorm",
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dim, by `F.layer_norm` and `F.rms_norm`.

    Args:
        input: `[*, in]`.
        weight: `[in]`, plain. With `zero_centered_gamma` the scale is `1 + weight`.
        bias: `[in]`, plain, or None. LayerNorm only.
        normalization: "LayerNorm": `(x - mean) / sqrt(var + eps)`; "RMSNorm": `x / sqrt(mean of x^2 + eps)`.
        eps: Added under the root.
        zero_centered_gamma: In bf16 and fp16 the norm then runs in fp32, and keeps an fp32 copy of the input, because
            `1 + weight` would round small weights away.

    Returns:
        `[*, in]`.

    Raises:
        GTPValueError: `normalization` is unknown, or RMSNorm was given a bias.
    """
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise GTPValueError(f"normalization must be 'LayerNorm' or 'RMSNorm', got {normalization!r}")
    if normalization == "RMSNorm" and bias is not None:
        raise GTPValueError("normalization='RMSNorm' has no bias: pass None, or use 'LayerNorm'")
    dtype = input.dtype
    if zero_centered_gamma:
        wide = torch.promote_types(weight.dtype, torch.float32)
        input, weight, bias = input.to(wide), 1 + weight.to(wide), None if bias is None else bias.to(wide)
    if normalization == "LayerNorm":
        normed = F.layer_norm(input, weight.shape, weight, bias, eps)
    else:
        normed = F.rms_norm(input, list(weight.shape), weight, eps)
    return normed.to(dtype) if zero_centered_gamma else normed


def layernorm_linear(
    input: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    normalization: Normalization = "LayerNorm",
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> torch.Tensor:
    """`linear(norm(input, norm_weight, norm_bias), weight, bias)`, bit for bit, forward and backward.

    Memory kept for backward, beside what `linear` says of the weight: the input and what torch's own norm keeps of it
    (LayerNorm: mean and rstd, two numbers per token). The norm's output is not kept; backward computes it again, one
    elementwise pass, for the wgrad. With a plain weight it is kept, as torch does. Who needs the norm's output calls
    `norm` and `linear`.

    Args:
        input: `[*, in]`.
        norm_weight, norm_bias, normalization, eps, zero_centered_gamma: As in `norm`.
        weight: Distributed `[shard_rows, in]` of the full `[out, in]`; or plain `[out, in]`.
        bias: `[out]`, plain.

    Returns:
        `[*, out]`.

    Raises:
        What `norm` and `linear` raise.
    """
    normalize = functools.partial(norm, normalization=normalization, eps=eps, zero_centered_gamma=zero_centered_gamma)
    if is_surely_plain(weight):
        refuse_distributed("layernorm_linear", input=input, norm_weight=norm_weight, norm_bias=norm_bias)
        return linear(normalize(input, norm_weight, norm_bias), weight, bias)
    return _managed_layernorm_linear(normalize, input, norm_weight, norm_bias, weight, bias)


@outside_graphs
def _managed_layernorm_linear(
    normalize: Callable[..., torch.Tensor],
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    refuse_distributed("layernorm_linear", input=x, norm_weight=norm_weight, norm_bias=norm_bias, bias=bias)
    if not is_managed(weight):
        return linear(normalize(x, norm_weight, norm_bias), weight, bias)
    with plain_access():
        shape, trainable = weight.shape, weight.requires_grad
    check_shapes(x, weight, shape)
    graphed = trainable and torch.is_grad_enabled()
    if graphed and (x.layout is not torch.strided or x.is_nested):
        raise refused_input(weight, x)
    normed = normalize(x, norm_weight, norm_bias)
    if not graphed:
        return linear(normed, weight, bias)  # backward, if any, does not need the norm's output
    dtype = autocast_dtype(x)
    normed = autocast_to(normed, dtype)
    if bias is not None:
        bias = autocast_to(bias, dtype)
    kept_bias = None if norm_bias is None else norm_bias.detach()
    return _apply(normed, weight, bias, dtype, normalize, x.detach(), norm_weight.detach(), kept_bias)


class _NormedLinear(torch.autograd.Function):
    """
    n = norm(x) `[*, in]`, whose own backward is torch's; otherwise as `gtp.ops.linear._Linear`, weight trainable.

    forward   y = n W^T + b
    wgrad     DY^T N, N computed again
    dbias     sum of DY over tokens
    dgrad     DY W, given to the norm's backward

    Saved: x and the norm's parameters (which torch's norm saves as well: no memory of its own), and not n.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None,
        normalize: Callable[..., torch.Tensor],
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        y = gemm(normed, weight, bias, dtype, True)
        ctx.save_for_backward(x, norm_weight, norm_bias)
        ctx.weight = weight
        ctx.normalize = normalize
        ctx.dtype = dtype
        ctx.versions = ShardVersions([weight])
        ctx.bias_fused = normed.dim() == 2 or normed.is_contiguous()
        return y.data if y._is_view() else y  # [Note: outputs are no views]

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.weight
        refuse_double_backward([weight])
        need_normed, need_weight, need_bias = ctx.needs_input_grad[:3]
        if need_normed:
            ctx.versions.check([weight])
        dy_rows = as_rows(dy)
        dnormed = dweight = dbias = None
        x, norm_weight, norm_bias = ctx.saved_tensors
        if need_weight and is_wanted(ctx, 1):
            with _autocast(x, ctx.dtype):
                normed = autocast_to(ctx.normalize(x, norm_weight, norm_bias), ctx.dtype)
            dweight = weight_gradient(weight, dy_rows, as_rows(normed), rounded=ctx.dtype is not None)
            del normed
        if need_bias:
            dbias = bias_gradient(dy, dy_rows, ctx.bias_fused)
        if need_normed:
            dnormed = input_gradient(weight, dy_rows).reshape(x.shape)
        return dnormed, dweight, dbias, None, None, None, None, None


def _autocast(x: torch.Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Forward's autocast context, which has ended when backward runs: the norm must come out the same, bit for bit."""
    return torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


_apply: Final = apply_of(_NormedLinear)

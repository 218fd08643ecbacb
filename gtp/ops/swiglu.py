"""`silu_and_mul`: the activation of SwiGLU, `silu(gate) * up`. Triton on CUDA, torch elsewhere.

Computed in fp32 (fp64 for fp64) and rounded once, forward and backward. For fp32 and fp64 inputs on the CPU this is,
bit for bit, `F.silu(gate) * up`; for bf16 it is more accurate than that expression, which rounds `silu(gate)` first.

    y = silu(g) u                       s = sigmoid(g)
    dg = dy u s (1 + g (1 - s))         du = dy silu(g)

A graph break for torch.compile: traced, the gradients that are written into strided views would be lost.

Second derivatives (create_graph=True) and transforms of torch.func (grad, vmap, ...) take the same formulas in torch's
own operations, on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gtp.errors import GTPValueError
from gtp.ops.compilers import never_compiled, outside_graphs

RowLimit = int | torch.Tensor | None


@outside_graphs
def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, *, num_rows: RowLimit = None) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate: `[..., H]`, any strides.
        up: The same shape and dtype, any strides.
        num_rows: How many of the rows (all dims but the last, flattened) count; an int, or an integer tensor of one
            element, which is not read on the host. Rows from there on give 0 and receive gradient 0, whatever they
            hold: token buffers of a mixture of experts are longer than what the splits say. None: all rows.

    Returns:
        `[..., H]`, contiguous.

    Raises:
        GTPValueError: shapes or dtypes differ, or `num_rows` is not a row count.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise GTPValueError(
            "silu_and_mul: gate and up must have one shape, dtype and device, got "
            f"{tuple(gate.shape)} {gate.dtype} on {gate.device} and {tuple(up.shape)} {up.dtype} on {up.device}"
        )
    _check(gate, num_rows)
    if torch._C._are_functorch_transforms_active():
        return _differentiable(gate, up, num_rows)
    y: torch.Tensor = _SiluAndMul.apply(gate, up, num_rows)  # type: ignore[no-untyped-call]
    return y


@outside_graphs
def silu_and_mul_pairs(pairs: torch.Tensor, *, num_rows: RowLimit = None) -> torch.Tensor:
    """As `silu_and_mul`, for a fused projection whose output features alternate gate, up, gate, up.

    Its gradient is one tensor, written once: two strided views of `pairs` would cost two zero-filled ones and a sum.

    Args:
        pairs: `[..., H, 2]`: gate at index 0 of the last dim, up at index 1; any strides.
        num_rows: As in `silu_and_mul`; rows are all dims but the last two, flattened.

    Returns:
        `[..., H]`, contiguous.
    """
    if pairs.ndim < 2 or pairs.shape[-1] != 2:
        raise GTPValueError(f"silu_and_mul_pairs: pairs must be [..., H, 2], got {tuple(pairs.shape)}")
    _check(pairs, num_rows)
    if torch._C._are_functorch_transforms_active():
        return _differentiable(*_gate_and_up(pairs, True), num_rows)
    y: torch.Tensor = _SiluAndMulPacked.apply(pairs, True, num_rows)  # type: ignore[no-untyped-call]
    return y


@outside_graphs
def silu_and_mul_halves(packed: torch.Tensor, *, num_rows: RowLimit = None) -> torch.Tensor:
    """As `silu_and_mul_pairs`, for a projection whose first half of features is gate and the second up.

    Args:
        packed: `[..., 2 H]`, any strides.
        num_rows: As in `silu_and_mul`.

    Returns:
        `[..., H]`, contiguous.
    """
    if packed.ndim < 1 or packed.shape[-1] % 2:
        raise GTPValueError(f"silu_and_mul_halves: packed must be [..., 2 H], got {tuple(packed.shape)}")
    _check(packed, num_rows)
    if torch._C._are_functorch_transforms_active():
        return _differentiable(*_gate_and_up(packed, False), num_rows)
    y: torch.Tensor = _SiluAndMulPacked.apply(packed, False, num_rows)  # type: ignore[no-untyped-call]
    return y


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, num_rows: RowLimit) -> torch.Tensor:
        ctx.num_rows = num_rows
        ctx.save_for_backward(gate, up)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _forward(gate, up, num_rows, out)
        return out

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable_gradients(dy, gate, up, ctx.num_rows), None
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty_like(dgate)
        _backward(dy, gate, up, ctx.num_rows, dgate, dup)
        return dgate, dup, None


class _SiluAndMulPacked(torch.autograd.Function):
    """Of one tensor that holds gate and up, which `_gate_and_up` tells apart; its gradient is written once."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, pairs: bool, num_rows: RowLimit) -> torch.Tensor:
        ctx.pairs, ctx.num_rows = pairs, num_rows
        ctx.save_for_backward(packed)
        gate, up = _gate_and_up(packed, pairs)
        out = torch.empty(gate.shape, dtype=packed.dtype, device=packed.device)
        _forward(gate, up, num_rows, out)
        return out

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            both = _differentiable_gradients(dy, *_gate_and_up(packed, ctx.pairs), ctx.num_rows)
            return torch.stack(both, -1) if ctx.pairs else torch.cat(both, -1), None, None
        dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        _backward(dy, *_gate_and_up(packed, ctx.pairs), ctx.num_rows, *_gate_and_up(dpacked, ctx.pairs))
        return dpacked, None, None


def _gate_and_up(packed: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of `[..., H, 2]` (pairs) or `[..., 2 H]` (halves)."""
    gate, up = packed.unbind(-1) if pairs else packed.chunk(2, -1)
    return gate, up


def _forward(gate: torch.Tensor, up: torch.Tensor, num_rows: RowLimit, out: torch.Tensor) -> None:
    if gate.device.type == "cuda":
        from gtp.ops.kernels.silu import silu_and_mul_forward

        return silu_and_mul_forward(gate, up, num_rows, out)
    wide = _wide(gate)
    y = F.silu(gate.to(wide)) * up.to(wide)
    out.copy_(_limited(y, num_rows))


def _backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    num_rows: RowLimit,
    dgate: torch.Tensor,
    dup: torch.Tensor,
) -> None:
    """Writes `dgate` and `dup`, any strides."""
    if gate.device.type == "cuda":
        from gtp.ops.kernels.silu import silu_and_mul_backward

        return silu_and_mul_backward(dy, gate, up, num_rows, dgate, dup)
    wide = _wide(gate)
    g, u, d = gate.to(wide), up.to(wide), dy.to(wide)
    dgate.copy_(_limited(torch.ops.aten.silu_backward(d * u, g), num_rows))
    dup.copy_(_limited(d * F.silu(g), num_rows))


def _differentiable(gate: torch.Tensor, up: torch.Tensor, num_rows: RowLimit) -> torch.Tensor:
    g, u = (_limited(t.to(_wide(gate)), num_rows) for t in (gate, up))
    return (F.silu(g) * u).to(gate.dtype)


def _differentiable_gradients(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, num_rows: RowLimit
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up. Rows are cut before anything else: a derivative of 0 times NaN would be NaN."""
    d, g, u = (_limited(t.to(_wide(gate)), num_rows) for t in (dy, gate, up))
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)


def _limited(values: torch.Tensor, num_rows: RowLimit) -> torch.Tensor:
    """`values` with 0 in the rows from `num_rows` on, also where they hold NaN."""
    if num_rows is None:
        return values
    rows = torch.arange(values.shape[:-1].numel(), device=values.device).view(values.shape[:-1])
    return torch.where((rows < num_rows).unsqueeze(-1), values, 0.0)


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _check(t: torch.Tensor, num_rows: RowLimit) -> None:
    if not t.is_floating_point():
        raise GTPValueError(f"silu_and_mul: needs a floating-point tensor, got {t.dtype}")
    if num_rows is not None and t.ndim == 0:
        raise GTPValueError("silu_and_mul: num_rows needs at least one dim, the features; got a scalar")
    if isinstance(num_rows, torch.Tensor):
        if num_rows.numel() != 1 or num_rows.is_floating_point() or num_rows.device != t.device:
            raise GTPValueError(
                f"silu_and_mul: num_rows must be an integer tensor of one element on {t.device}, got "
                f"{tuple(num_rows.shape)} {num_rows.dtype} on {num_rows.device}"
            )
    elif num_rows is not None and (isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 0):
        raise GTPValueError(
            f"silu_and_mul: num_rows must be None, an integer >= 0 or an integer tensor, got {num_rows!r}"
        )

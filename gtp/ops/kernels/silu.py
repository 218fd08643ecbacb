"""Triton kernels of `gtp.ops.swiglu`: `silu(gate) * up` and its gradient, over strided rows, in fp32, rounded once."""

from __future__ import annotations

from typing import Any

import torch

from gtp.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "gtp.ops.silu_and_mul on CUDA is a Triton kernel, and the package triton is not installed: pip install triton"
    ) from error

BLOCK = 1024  # columns per program


@triton.jit  # type: ignore[untyped-decorator]
def _limit(limit, LOADED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row limit: a number, or where it lies."""
    if LOADED:
        return tl.load(limit).to(tl.int64)
    else:
        return limit.to(tl.int64)


@triton.jit(do_not_specialize=["limit"])  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    gate,  # [rows, columns], each with strides of its own
    up,
    out,
    limit,  # rows that count
    columns,
    gate_row,
    gate_column,
    up_row,
    up_column,
    out_row,
    LOADED: tl.constexpr,
    WIDE: tl.constexpr,  # tl.float32, or tl.float64
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    counts = inside & (row < _limit(limit, LOADED))
    g = tl.load(gate + row * gate_row + column * gate_column, mask=counts, other=0.0).to(WIDE)
    u = tl.load(up + row * up_row + column * up_column, mask=counts, other=0.0).to(WIDE)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + row * out_row + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["limit"])  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    dy,
    gate,
    up,
    dgate,
    dup,
    limit,
    columns,
    dy_row,
    dy_column,
    gate_row,
    gate_column,
    up_row,
    up_column,
    dgate_row,
    dgate_column,
    dup_row,
    dup_column,
    LOADED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    counts = inside & (row < _limit(limit, LOADED))
    d = tl.load(dy + row * dy_row + column * dy_column, mask=counts, other=0.0).to(WIDE)
    g = tl.load(gate + row * gate_row + column * gate_column, mask=counts, other=0.0).to(WIDE)
    u = tl.load(up + row * up_row + column * up_column, mask=counts, other=0.0).to(WIDE)
    s = 1.0 / (1.0 + tl.exp(-g))
    dg = d * u * s * (1.0 + g * (1.0 - s))
    du = d * g * s
    tl.store(dgate + row * dgate_row + column * dgate_column, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * dup_row + column * dup_column, du.to(dup.dtype.element_ty), mask=inside)


def silu_and_mul_forward(
    gate: torch.Tensor, up: torch.Tensor, num_rows: int | torch.Tensor | None, out: torch.Tensor
) -> None:
    """`out = silu(gate) * up`, 0 from row `num_rows` on. `gate`, `up` `[..., H]` any strides; `out` contiguous."""
    gate, up, out = _rows(gate), _rows(up), out.view(-1, out.shape[-1])
    if out.numel() == 0:
        return
    forward_kernel[_grid(out)](
        gate, up, out, _row_limit(num_rows, out), out.shape[1], *gate.stride(), *up.stride(), out.stride(0),
        **_constants(gate, num_rows),
    )  # fmt: skip


def silu_and_mul_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    num_rows: int | torch.Tensor | None,
    dgate: torch.Tensor,
    dup: torch.Tensor,
) -> None:
    """Writes the gradients into `dgate` and `dup` `[..., H]`, whose leading dims can be flattened without a copy."""
    columns = gate.shape[-1]
    dy, gate, up = _rows(dy), _rows(gate), _rows(up)
    dgate, dup = (t.view(-1, columns) for t in (dgate, dup))
    if gate.numel() == 0:
        return
    backward_kernel[_grid(gate)](
        dy, gate, up, dgate, dup, _row_limit(num_rows, gate), columns,
        *dy.stride(), *gate.stride(), *up.stride(), *dgate.stride(), *dup.stride(),
        **_constants(gate, num_rows),
    )  # fmt: skip


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1])


def _grid(t: torch.Tensor) -> tuple[int, int]:
    return t.shape[0], triton.cdiv(t.shape[1], BLOCK)


def _row_limit(num_rows: int | torch.Tensor | None, t: torch.Tensor) -> int | torch.Tensor:
    return t.shape[0] if num_rows is None else num_rows


def _constants(t: torch.Tensor, num_rows: int | torch.Tensor | None) -> dict[str, Any]:
    wide = tl.float64 if t.dtype == torch.float64 else tl.float32
    return {"LOADED": isinstance(num_rows, torch.Tensor), "WIDE": wide, "BLOCK": BLOCK}

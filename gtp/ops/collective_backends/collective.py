"""`CollectiveBackend`: a collective, then a GEMM. Runs on every device and process group, gloo too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gtp.ops.collective_backends.base import Factor, Gathering, GemmBackend


class CollectiveBackend(GemmBackend):
    """The reference: what Megatron-style tensor parallelism does without fusion.

    The gather starts at once and is waited for by the first GEMM, so whatever the caller does in
    between (materializing a weight) overlaps it. Sums over ranks are the process group's: NCCL and gloo add in the
    tensors' dtype.
    """

    name = "collective"
    gathers_under_matmul = False

    def gather(self, rows: torch.Tensor, *, whole: bool = False, columns: bool = False, width: int = 0) -> Gathering:
        rows = rows.contiguous()
        self.agree("gather", rows.shape[0], rows.shape[1], rows)
        full = rows.new_empty(self.size * rows.shape[0], rows.shape[1])
        work = None
        if rows.numel():
            work = dist.all_gather_into_tensor(full, rows, group=self.process_group, async_op=True)
        return Gathered(self, full, work)

    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return multiply_then_scatter(self, products)


class SingleRankBackend(GemmBackend):
    """A group of one rank, or no group: the GEMM alone."""

    name = "single_rank"
    gathers_under_matmul = False

    def __init__(self) -> None:
        super().__init__(None)

    def gather(self, rows: torch.Tensor, *, whole: bool = False, columns: bool = False, width: int = 0) -> Gathering:
        return Gathered(self, rows, None)

    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return sum_of_products(products)


def multiply_then_scatter(backend: GemmBackend, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """`GemmBackend.matmul_reduce_scatter` by a GEMM and then a collective."""
    partial = sum_of_products(products)
    backend.agree("reduce-scatter", partial.shape[0], partial.shape[1], partial)
    out = partial.new_empty(partial.shape[0] // backend.size, partial.shape[1])
    if out.numel():
        dist.reduce_scatter_tensor(out, partial, op=dist.ReduceOp.SUM, group=backend.process_group)
    return out


class Gathered(Gathering):
    """Rows that are there, or on their way by a collective.

    Args:
        backend: Knows the rank.
        full: `[M, K]`.
        work: What to wait for before they are read.
    """

    def __init__(self, backend: GemmBackend, full: torch.Tensor, work: dist.Work | None) -> None:
        self._backend = backend
        self._full = full
        self._work = work

    def matmul(self, factors: Sequence[Factor]) -> list[torch.Tensor]:
        full = self.full()
        return [multiply(full, factor.matrix, factor.bias, factor.out) for factor in factors]

    def full(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._full

    def columns(self) -> torch.Tensor:
        return columns_of(self.full(), self._backend)

    def finish(self) -> None:
        self.full()


def columns_of(full: torch.Tensor, backend: GemmBackend) -> torch.Tensor:
    """A rank's equal part of the columns of gathered rows, `[M, K/R]`; the rows themselves if it is the only rank."""
    width = full.shape[1] // backend.size
    return full.narrow(1, backend.rank * width, width).contiguous()


def multiply(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`a @ b + bias`, rounded once, in one GEMM. `out` may be fp32 where the operands are narrower."""
    if bias is not None:
        return torch.addmm(bias, a, b) if out is None else torch.addmm(bias, a, b, out=out)
    if out is None:
        return torch.mm(a, b)
    if out.dtype is a.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda and out.dtype is torch.float32:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(a, b))


def sum_of_products(
    products: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of `a @ b`. Each product is added in the GEMM's accumulator; the running sum is rounded once per product."""
    a, b = products[0]
    total = multiply(a, b, out=out)
    for a, b in products[1:]:
        total.addmm_(a, b)
    return total

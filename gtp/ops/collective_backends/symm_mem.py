"""`SymmMemBackend`: torch's fused operators over symmetric memory, `symm_mem::fused_all_gather_matmul` and its twin.

The workspace is torch's own, one per process group, shared by everything that uses these operators over the group: two
of them must not be in flight at once. They run on the current stream, one after the other, so they are not. torch drops
a workspace when a larger one is needed; those that a CUDA graph has the addresses of are kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import get_symm_mem_workspace

from gtp.errors import GTPStateError, GTPValueError
from gtp.ops.collective_backends.base import Factor, Gathering, GemmBackend
from gtp.ops.collective_backends.collective import Gathered, columns_of


class SymmMemBackend(GemmBackend):
    """Peer copies under a GEMM that is split by rank, with barriers that take an SM each. No bias inside the GEMM.

    Products are rounded once; sums over ranks are torch's, of the rounded products, in fp32, rounded once.

    Args:
        process_group: Its ranks must reach each other's memory (`gtp.ops.peer.why_not`).
        device: This rank's GPU.
        debug: See `GemmBackend`.
    """

    name = "symm_mem"
    takes_bias = False
    gathers_under_matmul = True

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, *, debug: bool = False) -> None:
        super().__init__(process_group, debug=debug)
        self._group_name = process_group.group_name
        self._captured: dict[int, Any] = {}  # by address; a handle keeps the memory of all ranks
        with torch.cuda.device(device):
            # set up now, where failure is clear, and not in the first layer's forward
            get_symm_mem_workspace(self._group_name, min_size=1 << 20)

    def gather(self, rows: torch.Tensor, *, whole: bool = False, columns: bool = False, width: int = 0) -> Gathering:
        self.agree("gather", rows.shape[0], rows.shape[1], rows)
        if rows.numel():
            return _Gathering(self, rows.contiguous(), whole or columns)
        return Gathered(self, rows.new_empty(rows.shape[0] * self.size, rows.shape[1]), None)

    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        # one operator for the sum of all products: contracted dims side by side
        a = products[0][0] if len(products) == 1 else torch.cat([a for a, _ in products], dim=1)
        b = products[0][1] if len(products) == 1 else torch.cat([b for _, b in products], dim=0)
        self.agree("reduce-scatter", a.shape[0], b.shape[1], a)
        if not a.shape[0] or not b.shape[1]:
            return a.new_empty(a.shape[0] // self.size, b.shape[1])
        out: torch.Tensor = self.fused(
            lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(
                a, b, "sum", scatter_dim=0, group_name=self._group_name
            )
        )
        return out

    def all_gather_matmul(
        self, rows: torch.Tensor, matrices: list[torch.Tensor], whole: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The gathered rows, if `whole`, and their products."""
        full, products = self.fused(
            lambda: torch.ops.symm_mem.fused_all_gather_matmul(
                rows, matrices, gather_dim=0, group_name=self._group_name, return_A=whole
            )
        )
        return full, products

    def fused[T](self, call: Callable[[], T]) -> T:
        """
        Raises:
            GTPStateError: torch's workspace would have to grow while a CUDA graph is captured.
        """
        try:
            result = call()
        except RuntimeError as error:
            if torch.cuda.is_current_stream_capturing() and "workspace" in str(error):
                raise GTPStateError(
                    "tp_gemm_backend='symm_mem': this call needs a larger workspace than any before, and it cannot "
                    "grow while a CUDA graph is captured. Run forward and backward once at the largest size before "
                    "the capture"
                ) from error
            raise
        if torch.cuda.is_current_stream_capturing():
            workspace = get_symm_mem_workspace(self._group_name, min_size=0)
            self._captured[workspace.buffer_ptrs[self.rank]] = workspace
        return result


class _Gathering(Gathering):
    def __init__(self, backend: SymmMemBackend, rows: torch.Tensor, whole: bool) -> None:
        self._backend = backend
        self._rows = rows
        self._whole = whole
        self._full: torch.Tensor | None = None

    def matmul(self, factors: Sequence[Factor]) -> list[torch.Tensor]:
        if any(factor.bias is not None for factor in factors):
            raise GTPValueError("tp_gemm_backend='symm_mem' takes no bias in the GEMM")
        matrices = [factor.matrix for factor in factors]
        self._full, products = self._backend.all_gather_matmul(self._rows, matrices, self._whole)
        both = zip(factors, products, strict=True)
        return [product if factor.out is None else factor.out.copy_(product) for factor, product in both]

    def full(self) -> torch.Tensor:
        if self._full is None:
            # nobody multiplied: there is nothing to fuse with
            rows, backend = self._rows, self._backend
            self._full = rows.new_empty(rows.shape[0] * backend.size, rows.shape[1])
            dist.all_gather_into_tensor(self._full, rows, group=backend.process_group)
        return self._full

    def columns(self) -> torch.Tensor:
        return columns_of(self.full(), self._backend)

    def finish(self) -> None:
        """The operators have run on the current stream."""

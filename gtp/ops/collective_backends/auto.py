"""`AutoBackend`: for each product, what was measured to be fastest for it. The measurements: docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from gtp.ops.collective_backends.collective import multiply_then_scatter
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend

EAGER_SCATTER_FLOP: Final = 1e11
"""Floating-point operations of one rank's product from which eager code multiplies and reduce-scatters by peer copies.

Two H200s, forward: 3.4e10 (0.05 ms) are faster by NCCL, because the host is not done queueing the copies when the GPU
is with the product; 1.2e11 (0.16 ms) and more are faster by peer copies. In a CUDA graph everything is.
"""


class AutoBackend(CopyEngineBackend):
    """The copy engine, but small reduce-scatters in eager code go by a collective. See `CopyEngineBackend`."""

    name = "auto"

    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        flop = sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in products)
        if flop < EAGER_SCATTER_FLOP and not self.driver.capture():
            a, b = products[0]
            out = multiply_then_scatter(self, products)  # first: it makes sure that ranks agree on the size
            self.reserve(a.shape[0] * b.shape[1] * a.element_size())  # a graph that is captured next will need it
            return out
        return super().matmul_reduce_scatter(products)

"""Pools of gathered weights and wgrads in a whole model's rhythm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.null_transport import NullTransport


def _buffers_made_in_a_late_step(widths: list[int]) -> tuple[int, int]:
    """Layers whose weights have these numbers of rows, twelve of each, in turns."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, width, bias=False) for width in widths])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = x + part(x).sum(-1, keepdim=True)
            return x

    model = nn.Sequential(*[Block() for _ in range(12)])
    runtime = gtp.shard_model(model, dist.group.WORLD, transport=NullTransport())
    runtime.start()
    made = 0
    for pool in runtime._pools:
        allocate = pool._allocate

        def counting(nbytes: int, allocate: Any = allocate) -> torch.Tensor:
            nonlocal made
            made += 1
            return allocate(nbytes)

        pool._allocate = counting
    for _ in range(6):
        made = 0
        model(torch.randn(2, 16)).sum().backward()
        model.zero_grad()
    return made, sum(pool.reserved_bytes for pool in runtime._pools)


@pytest.mark.parametrize("widths", [[256], [192, 128, 896, 128], [192, 128, 512, 256], [64, 1024], [32, 32, 32, 2048]])
def test_a_steady_step_makes_no_buffers(ranks, widths: list[int]) -> None:
    """Also where unlike weights alternate, and one window holds other sizes than the next."""
    nbytes = [width * 16 * 4 for width in widths]
    window, largest = 4 * sum(nbytes) // len(nbytes), max(nbytes)
    for made, reserved in ranks(2).run(_buffers_made_in_a_late_step, widths):
        assert made == 0
        assert reserved <= 2 * max(window + 2 * largest, 2 * window) + largest

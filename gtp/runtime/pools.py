"""The pools of one runtime, and how many bytes they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gtp.config import GTPConfig
from gtp.runtime.buffers import BufferPool
from gtp.runtime.group import WeightGroup


class Pools(NamedTuple):
    """Memory for gathered weights, and for full-size wgrads."""

    gathers: BufferPool
    wgrads: BufferPool


def prefetch_window(groups: Sequence[WeightGroup], config: GTPConfig) -> int:
    """Bytes of weights that may be gathered ahead: what the settings say, or four mean weight groups."""
    sizes = [group.gathered_nbytes for group in groups]
    return _four_mean(sizes) if config.prefetch_bytes is None else config.prefetch_bytes


def reduce_window(groups: Sequence[WeightGroup], config: GTPConfig) -> int:
    """Bytes of wgrads whose reduction may be in flight: four mean weight groups."""
    return _four_mean([_wgrad_nbytes(group, config) for group in groups])


def make_pools(groups: Sequence[WeightGroup], config: GTPConfig, device: torch.device) -> Pools:
    """Empty pools."""

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pool(window: int, sizes: list[int], kept: int) -> BufferPool:
        limit = _limit(window, max(sizes, default=0)) + kept
        return BufferPool(allocate, limit=limit, on_cuda=device.type == "cuda")

    return Pools(
        pool(prefetch_window(groups, config), [g.gathered_nbytes for g in groups], config.keep_bytes),
        pool(reduce_window(groups, config), [_wgrad_nbytes(g, config) for g in groups], 0),
    )


def _limit(window: int, largest: int) -> int:
    """Bytes of buffers that a pool keeps for a window of this many bytes in use ahead, or on their way back.

    Two in use beyond the window; and room for twice the window, since its contents change: where one window holds a
    layer of unlike weights, two buffers of each size may be wanted at some time, and must not be made anew each step.
    """
    return max(window + 2 * largest, 2 * window)


def _wgrad_nbytes(group: WeightGroup, config: GTPConfig) -> int:
    dtype = config.reduce_dtype or group.compute_dtype
    return sum(m.gathered_numel(group.size) for m in group.members) * dtype.itemsize


def _four_mean(sizes: Sequence[int]) -> int:
    return 4 * sum(sizes) // max(len(sizes), 1)

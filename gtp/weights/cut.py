"""`take_shard`: one rank's rows out of a full tensor."""

from __future__ import annotations

import torch

from gtp.weights.layout import ShardLayout


def take_shard(full: torch.Tensor, layout: ShardLayout, device: torch.device | None = None) -> torch.Tensor:
    """The rows of `layout`'s rank out of a full tensor `[rows, *trailing]`, in fresh memory, padding zero.

    Args:
        full: Plain.
        layout: Which rows, and how much padding.
        device: Where the shard goes. Default: where `full` is.
    """
    shard = torch.zeros(layout.shard_shape, dtype=full.dtype, device=full.device if device is None else device)
    shard[layout.valid_slice].copy_(full.detach()[layout.shard_slice])
    return shard

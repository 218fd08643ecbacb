"""Megatron's distributed checkpoints: written in one layout, loaded in any other, sharded by gtp or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state


def save(folder: Path, model: Any, optimizer: Any) -> None:
    """Writes model and optimizer to `folder`, which is made if it is missing."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_described(model, optimizer), str(folder))


def load(folder: Path, model: Any, optimizer: Any) -> None:
    """Fills model and optimizer from `folder`."""
    state = dist_checkpointing.load(_described(model, optimizer, loading=True), str(folder))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _described(model: Any, optimizer: Any, *, loading: bool = False) -> dict[str, Any]:
    """Which part of which global tensor each local one is."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=dict(metadata)),
    }

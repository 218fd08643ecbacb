"""Checkpoints of sharded models: torch.distributed.checkpoint, plain state dicts, optimizer state."""

from gtp.checkpoint.dcp import load, save
from gtp.checkpoint.full import full_state_dict, load_full_state_dict
from gtp.checkpoint.optimizer import load_optimizer_state_dict, optimizer_state_dict
from gtp.weights.shard_tensor import ShardTensor

__all__ = [
    "ShardTensor",
    "full_state_dict",
    "load",
    "load_full_state_dict",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "save",
]

"""`load_state_dict` on a sharded model: full tensors are cut to this rank's rows; shards are taken as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gtp.errors import GTPValueError, UnsupportedError
from gtp.weights.parameter import GTPWeight


def hook_state_dict(model: nn.Module) -> None:
    """Registers the hooks that make `load_state_dict` right on `model` and on its submodules."""
    model.register_load_state_dict_pre_hook(_refuse_assign)
    for module in model.modules():
        if any(isinstance(p, GTPWeight) for p in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_cut_full_tensors)


def _refuse_assign(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers", False):
        raise UnsupportedError(
            "load_state_dict(assign=True) would put plain tensors in the place of sharded weights, and the runtime "
            "would go on with the old ones. The model is unchanged: load with assign=False, or load before "
            "gtp.shard_model"
        )


def _cut_full_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    _refuse_assign(module, state_dict, prefix, local_metadata)
    for attribute, weight in module._parameters.items():
        if not isinstance(weight, GTPWeight):
            continue
        value = state_dict.get(prefix + attribute)
        if not isinstance(value, torch.Tensor):
            continue
        layout = weight.layout
        shape = tuple(value.shape)
        if shape == layout.logical_shape:
            shard = torch.zeros(layout.shard_shape, dtype=value.dtype, device=value.device)
            shard[layout.valid_slice].copy_(value.detach()[layout.shard_slice])
            state_dict[prefix + attribute] = shard
        elif shape != layout.shard_shape:
            raise GTPValueError(
                f"{weight.name}: the state dict holds shape {shape}; a full tensor has {layout.logical_shape}, and "
                f"this rank's shard {layout.shard_shape}. A checkpoint from another number of ranks is loaded with "
                "gtp.checkpoint"
            )

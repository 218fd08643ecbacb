"""Megatron's distributed checkpoints (`megatron.core.dist_checkpointing`) of sharded weights.

Megatron describes each tensor by where its local part lies in a global one. `sharded_tensors` stands behind the name
that Megatron calls for modules with GTP weights: rows split over TP and GTP together, one writer per shard, replicated
tensors written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gtp.megatron.weight import MegatronGTPWeight


def sharded_tensors(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    extra_state_suffix: str = "_extra_state",
    *,
    tp_group: dist.ProcessGroup,
    dp_cp_group: dist.ProcessGroup,
    intra_dp_cp_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`ShardedTensor`s and `ShardedObject`s of one module's state dict.

    Args:
        state_dict: Names to tensors and extra state, with `keep_vars=True`.
        prefix: Prepended to every key.
        tensor_parallel_layers_axis_map: Axis that tensor parallelism splits, per name; others are replicated over TP.
        sharded_offsets: Axes prepended to the tensors, such as the layer number.
        extra_state_suffix: Names that end so are objects.
        tp_group: Tensor parallel group.
        dp_cp_group: Data parallel group, with or without the GTP axis.
        intra_dp_cp_group: The group over which shards are replicated. Default: Megatron's own.

    Returns:
        Key to entry. Of ranks that hold the same part, one is the writer.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
    from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

    axes = tensor_parallel_layers_axis_map or {}
    gtp_group = _gtp_group(state_dict)
    if intra_dp_cp_group is not None:
        replica = intra_dp_cp_group.rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True, with_gtp_remat=False)
    gtp_rank, gtp_size = (gtp_group.rank(), gtp_group.size()) if gtp_group is not None else (0, 1)
    # (pipeline, copies among model-parallel ranks, copies among data-parallel ranks): all zero means writer
    whole = (0, tp_group.rank() * gtp_size + gtp_rank, replica)
    groups = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    entries: dict[str, Any] = {}
    for name, value in state_dict.items():
        key = f"{prefix}{name}"
        if name.endswith(extra_state_suffix):
            entries[key] = make_sharded_object_for_checkpoint(value, key, sharded_offsets, replica_id=whole)
        elif isinstance(value, MegatronGTPWeight):
            entries[key] = make_tp_sharded_tensor_for_checkpoint(
                value, key, tp_axis=axes.get(name, 0), prepend_offsets=sharded_offsets, **groups
            )
        elif name in axes:
            entries[key] = make_tp_sharded_tensor_for_checkpoint(
                value,
                key,
                tp_axis=axes[name],
                replica_id=(0, gtp_rank, replica),
                prepend_offsets=sharded_offsets,
                **groups,
            )
        else:
            entries[key] = make_sharded_tensor_for_checkpoint(
                value, key, replica_id=whole, prepend_offsets=sharded_offsets, **groups
            )
    return entries


def _gtp_group(state_dict: Mapping[str, torch.Tensor]) -> dist.ProcessGroup | None:
    return next((value.group for value in state_dict.values() if isinstance(value, MegatronGTPWeight)), None)

"""Megatron's distributed checkpoints (`megatron.core.dist_checkpointing`) of sharded weights.

Megatron describes each tensor by where its local part lies in a global one. `sharded_tensors` stands behind the name
that Megatron calls for modules with GTP weights: rows split over TP and GTP together, one writer per shard, replicated
tensors written once. `WRAPPERS` and `METHOD_WRAPPERS` stand before more functions of Megatron, through which sharded
weights would be stored with their padding, with the halves of a gated fc1 interleaved, or as copies that no optimizer
knows (see [Note: what the file holds]).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist

from gtp.errors import UnsupportedError
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
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
    from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

    axes = tensor_parallel_layers_axis_map or {}
    gtp_group = _gtp_group(state_dict)
    replica = intra_dp_cp_group.rank() if intra_dp_cp_group is not None else _replica()
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
            axis = axes.get(name)
            copies = (0, 0 if axis is not None else tp_group.rank(), replica)
            entries[key] = _saved_rows(value, key, axis, tp_group, copies, sharded_offsets)
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


def _replica() -> int:
    """This rank's number among those that hold the same shards."""
    from megatron.core import parallel_state

    rank: int = parallel_state.get_data_parallel_rank(with_context_parallel=True, with_gtp_remat=False)
    return rank


def _saved_rows(
    weight: MegatronGTPWeight,
    key: str,
    tp_axis: int | None,
    tp_group: dist.ProcessGroup,
    replica_id: Any,
    prepended: tuple[tuple[int, int, int], ...],
    **options: Any,
) -> Any:
    from gtp.megatron.saved_rows import Placement, SavedRows

    placement = Placement(weight.layout, tp_axis, tp_group.rank(), tp_group.size(), tuple(prepended))
    return SavedRows.of(key, weight, placement, replica_id, **options)


def _tp_sharded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `make_tp_sharded_tensor_for_checkpoint`, which places sharded weights by their padded shape."""

    @functools.wraps(original)
    def make_tp_sharded_tensor_for_checkpoint(
        tensor: torch.Tensor,
        key: str,
        tp_axis: int = 0,
        replica_id: Any = None,
        prepend_offsets: tuple[tuple[int, int, int], ...] = (),
        **options: Any,
    ) -> Any:
        if not isinstance(tensor, MegatronGTPWeight):
            return original(tensor, key, tp_axis, replica_id, prepend_offsets, **options)
        from megatron.core import parallel_state

        tp_group = options.pop("tp_group", None) or parallel_state.get_tensor_model_parallel_group()
        options.pop("dp_cp_group", None)
        copies = replica_id if replica_id is not None else (0, 0, _replica())
        return _saved_rows(tensor, key, tp_axis, tp_group, copies, prepend_offsets, **options)

    return make_tp_sharded_tensor_for_checkpoint


def _gated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `apply_swiglu_sharded_factory`, which takes each shard for a gate half over an up half."""

    @functools.wraps(original)
    def apply_swiglu_sharded_factory(
        original_sh_ten: Any, sharded_offsets: Any, singleton_local_shards: bool = False, *args: Any, **options: Any
    ) -> Any:
        from gtp.megatron.saved_rows import SavedRows

        if not isinstance(original_sh_ten, SavedRows):
            return original(original_sh_ten, sharded_offsets, singleton_local_shards, *args, **options)
        placement = dataclasses.replace(original_sh_ten.placement, stacked=("_w", "_v"), apart=singleton_local_shards)
        return dataclasses.replace(original_sh_ten, placement=placement)

    return apply_swiglu_sharded_factory


def _in_proj(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `sharded_state_dict` of Mamba mixers and gated delta nets, whose in_proj stacks several matrices.

    Megatron expects it whole; where it is sharded, it gathers a copy, which no optimizer finds its parameter by.
    """

    @functools.wraps(original)
    def sharded_state_dict(
        mixer: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, *args: Any, **options: Any
    ) -> Any:
        layer = mixer.in_proj
        weight = layer.weight
        if not isinstance(weight, MegatronGTPWeight):
            return original(mixer, prefix, sharded_offsets, metadata, *args, **options)
        from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

        metadata = ensure_metadata_has_dp_cp_group(metadata)
        key = f"{prefix}in_proj.weight"
        rows = layer.sharded_state_dict(f"{prefix}in_proj.", sharded_offsets, metadata)[key]
        layer._parameters["weight"] = torch.nn.Parameter(
            torch.empty(weight.logical_shape, dtype=weight.plain_shard().dtype, device="meta"), requires_grad=False
        )
        try:
            entries = original(mixer, prefix, sharded_offsets, metadata, *args, **options)
        finally:
            layer._parameters["weight"] = weight
        parts = entries[key].build()
        placement = dataclasses.replace(
            rows.placement,
            stacked=tuple(part.key.removeprefix(key) for part in parts),
            heights=tuple(part.data.shape[0] for part in parts),
            apart=True,
        )
        entries[key] = dataclasses.replace(rows, placement=placement)
        return entries

    return sharded_state_dict


def _each_in_its_own_file(original: Callable[..., None]) -> Callable[..., None]:
    """Before `save_parameter_state` of optimizers: a file of the state of one group of replicas, named by the caller.

    Ranks of a GTP axis are not replicas, and each writes the state of its shards.
    """

    @functools.wraps(original)
    def save_parameter_state(optimizer: Any, filename: str) -> None:
        chunks = getattr(optimizer, "model_chunks", ())
        weights = [p for chunk in chunks for p in chunk.parameters() if isinstance(p, MegatronGTPWeight)]
        for group in dict.fromkeys(weight.group for weight in weights):
            names: list[Any] = [None] * group.size()
            dist.all_gather_object(names, str(filename), group=group)
            if len(set(names)) < len(names):
                raise UnsupportedError(
                    f"save_parameter_state({str(filename)!r}): ranks {dist.get_process_group_ranks(group)} hold the "
                    "state of different shards and would write it to one file. Give the name of each a part of its "
                    "own, such as its rank, or save with megatron.core.dist_checkpointing, whose files any layout can "
                    "load (--ckpt-format torch_dist)"
                )
        original(optimizer, filename)

    return save_parameter_state


METHOD_WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {
        "MambaMixer.sharded_state_dict": _in_proj,
        "_GDNBase.sharded_state_dict": _in_proj,
        "DistributedOptimizer.save_parameter_state": _each_in_its_own_file,
        "ChainedOptimizer.save_parameter_state": _each_in_its_own_file,
    }
)
"""Method of Megatron to what makes its replacement from it."""

WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {"make_tp_sharded_tensor_for_checkpoint": _tp_sharded, "apply_swiglu_sharded_factory": _gated}
)
"""Name of a function of Megatron to what makes its replacement from it."""

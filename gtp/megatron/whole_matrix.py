"""Optimizers that need the whole matrix: Megatron's Muon orthogonalizes full TP-local weights, and keeps our rows.

Megatron gathers the shards' momentum itself, but padded, and splits a fused QKV by the rows of the shard where they
happen to divide. Here the gathered matrix has its logical rows, so padding changes neither the update nor its scale,
and QKV is split as in the unsharded model. Norms of expert gradients are added over the experts' GTP axis too, as they
are with Megatron's other optimizers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, cast

import torch

from gtp.megatron.weight import MegatronGTPWeight
from gtp.runtime.process_group import gather_now

_WEIGHT: Final = "gtp_weight"  # on an fp32 master copy, a weak reference to the weight it belongs to


def _orthogonalize(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def orthogonalize(optimizer: Any, p: torch.Tensor, grad: torch.Tensor, **options: Any) -> torch.Tensor:
        weight = _weight_of(p)
        if weight is None:
            return original(optimizer, p, grad, **options)
        layout = weight.layout
        full = gather_now(grad, weight.group)[: layout.rows]
        whole = original(optimizer, _Whole(p, weight, optimizer.qkv_split_shapes), full, **options)
        rows = torch.zeros_like(grad)
        rows[layout.valid_slice] = whole[layout.shard_slice]
        return rows

    return orthogonalize


def _remember_weights(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(optimizer: Any, *args: Any, **options: Any) -> None:
        original(optimizer, *args, **options)
        for weights, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                if isinstance(weight, MegatronGTPWeight) and master is not None:
                    setattr(master, _WEIGHT, weakref.ref(weight))

    return __init__


def _norms_of_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `_get_megatron_emerging_optimizer`, which adds experts' norms over ranks without their GTP axis."""

    @functools.wraps(original)
    def make(
        config: Any, model_chunks: Any, config_overrides: Any = None, pg_collection: Any = None, **options: Any
    ) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        made = original(config, model_chunks, config_overrides, pg_collection, **options)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp_ep_pp_with_egtp_remat"])
        for optimizer in getattr(made, "chained_optimizers", ()):
            of_experts = any(group.get("is_expert_parallel") for group in optimizer.param_groups)
            if of_experts and hasattr(optimizer, "grad_stats_parallel_group"):
                optimizer.grad_stats_parallel_group = groups.tp_ep_pp_with_egtp_remat
        return made

    return make


def _weight_of(p: torch.Tensor) -> MegatronGTPWeight | None:
    if isinstance(p, MegatronGTPWeight):
        return p
    reference = getattr(p, _WEIGHT, None)
    return None if reference is None else cast(MegatronGTPWeight | None, reference())


class _Whole:
    """What Muon reads of a parameter beside its gradient, as if the weight were whole."""

    is_gtp_weight_remat = False

    def __init__(self, p: torch.Tensor, weight: MegatronGTPWeight, qkv_split_shapes: list[int] | None) -> None:
        self._p = p
        # Megatron marks a fused QKV if the rows it sees divide into heads, and it has seen those of the shard
        heads = sum(qkv_split_shapes or ())
        self.is_qkv = "linear_qkv.weight" in weight.name and heads > 0 and weight.layout.rows % heads == 0
        self.qkv_split_shapes = qkv_split_shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p, name)


WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {"_get_megatron_emerging_optimizer": _norms_of_experts}
)
"""Name of a function of Megatron to what makes its replacement from it."""

METHOD_WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {
        "TensorParallelMuon.orthogonalize": _orthogonalize,
        "Float16OptimizerWithFloat16Params.__init__": _remember_weights,
    }
)
"""Method of Megatron to what makes its replacement from it."""

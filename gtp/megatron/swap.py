"""`swap_parameters`: shards a Megatron-Core model that was built, and maybe loaded, without the flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gtp.config import GTPConfig
from gtp.errors import GTPStateError, UnsupportedError
from gtp.megatron import building
from gtp.megatron.foreign import modules_of_experts, refuse_foreign_in
from gtp.megatron.refusals import refuse_settings
from gtp.megatron.replicated import broadcast, broadcast_replicated
from gtp.megatron.tied import accept_supplied_weight
from gtp.megatron.weight import MegatronGTPWeight
from gtp.runtime.runtime import GTPRuntime
from gtp.weights.axes import Axes, broadcast_first_bytes
from gtp.weights.layout import ShardLayout
from gtp.weights.shard import take_shard


def swap_parameters(model: nn.Module) -> GTPRuntime:
    """Shards the weights of `model` in place, as if it had been built with the flag on. Collective.

    For a model that was built before the flag could be on: with `initialize_model_parallel()` without a GTP axis, then
    loaded from a plain checkpoint. Afterwards bring the axis up (`destroy_model_parallel`, then
    `initialize_model_parallel(gtp_remat_size=...)` with the same tensor parallelism) and swap. The values of rank 0 of
    each group win, of buffers too, so the other ranks need not have loaded.

    Call it before DistributedDataParallel and the optimizer are made, on the bare model.

    Args:
        model: A Megatron-Core model from its local layers. Its config objects get the flag's values.

    Returns:
        The model's runtime, also found with `runtime_of(model)`.

    Raises:
        GTPStateError: gtp is not installed, no GTP axis is up, the model is sharded already or wrapped by
            DistributedDataParallel.
        UnsupportedError: a weight belongs to a layer that cannot be swapped, or a setting of the model is not served.
            The message names it.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from gtp.megatron.backend import installation

    installed = installation()
    if installed is None:
        raise GTPStateError("swap_parameters needs gtp.megatron.install() first: Megatron asks it about the weights")
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["gtp_remat", "expt_gtp_remat"])
    layers = list(_layers(model, groups.gtp_remat, groups.expt_gtp_remat))
    _check(model, layers)
    for module in model.modules():
        refuse_settings(getattr(module, "config", None))
    device = building.device_for(next(model.parameters()), layers[0].group)
    runtime = building.runtime_for(model, installed.config, layers[0].group, device)
    for layer in layers:
        _shard(model, layer, runtime, installed.config)
    broadcast_replicated(model)
    _broadcast_buffers(model, groups.gtp_remat, groups.expt_gtp_remat, device)
    _announce(model, groups.gtp_remat, groups.expt_gtp_remat)
    return runtime


def runtimes_of(model: nn.Module | Sequence[nn.Module]) -> list[GTPRuntime]:
    """The runtimes behind the weights of a model, or of pipeline chunks: one per model that was built on its own."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    weights = (p for chunk in chunks for p in chunk.parameters() if isinstance(p, MegatronGTPWeight))
    return list(dict.fromkeys(weight.runtime for weight in weights))


def runtime_of(model: nn.Module) -> GTPRuntime:
    """The runtime of a sharded model, through any wrapper: for `stats()`, `trace()` and `release()`.

    Raises:
        GTPStateError: no weight of it is sharded, or they have several runtimes.
    """
    found = runtimes_of(model)
    if len(found) != 1:
        raise GTPStateError(
            f"{type(model).__name__} has no weight that gtp shards: was gtp.megatron.install() called before it was "
            "built, with a GTP axis in initialize_model_parallel(gtp_remat_size=...)?"
            if not found
            else f"{type(model).__name__} holds {len(found)} models built on their own: use runtimes_of(model)"
        )
    return found[0]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One Megatron layer whose weight is to be sharded; `weight` is None for a tied output layer."""

    name: str
    module: nn.Module
    weight: nn.Parameter | None
    group: dist.ProcessGroup


def _layers(model: nn.Module, dense: dist.ProcessGroup | None, expert: dist.ProcessGroup | None) -> Iterator[_Layer]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            group = expert if getattr(module, "is_expert", False) else dense
            if group is not None and group.size() > 1:
                yield _Layer(name, module, module._parameters.get("weight"), group)
        elif _is_transformer_engine(module) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            raise UnsupportedError(
                f"{name}: {type(module).__name__} is a Transformer Engine module, whose weights cannot be swapped "
                "after it was built. Build the model with tensor_parallel_num_weight_shards set, or from local layers"
            )


def _is_transformer_engine(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "transformer_engine" for base in type(module).__mro__)


def _check(model: nn.Module, layers: Sequence[_Layer]) -> None:
    if not layers:
        raise GTPStateError(
            "swap_parameters found nothing to shard: either no GTP axis is up "
            "(initialize_model_parallel(gtp_remat_size=...) with a size above 1), or "
            f"{type(model).__name__} holds no ColumnParallelLinear, RowParallelLinear or "
            "VocabParallelEmbedding"
        )
    refuse_foreign_in(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, MegatronGTPWeight):
            raise GTPStateError(f"{name} is sharded already: swap a model once")
        if getattr(parameter, "main_grad", None) is not None:
            raise GTPStateError(
                f"{name} has a gradient buffer of DistributedDataParallel: swap the bare model first, then wrap it"
            )


def _shard(root: nn.Module, layer: _Layer, runtime: GTPRuntime, config: GTPConfig) -> None:
    module: Any = layer.module
    module.gtp_remat_size = layer.group.size()
    if layer.weight is None:
        accept_supplied_weight(module)
        return
    if isinstance(layer.weight, MegatronGTPWeight):
        return  # tied to one that was swapped a moment ago
    full = layer.weight.detach().contiguous()
    broadcast(full, layer.group)
    layout = ShardLayout(tuple(full.shape), layer.group.size(), layer.group.rank(), config.alignment)
    shard = take_shard(full, layout, building.device_for(full, layer.group))
    building.adopt(root, module, ["weight"], [(layout, shard)], runtime, layer.group)


def _broadcast_buffers(
    model: nn.Module, dense: dist.ProcessGroup | None, expert: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Such as the router's bias of each expert."""
    of_experts = modules_of_experts(model)
    for module in model.modules():
        group = expert if module in of_experts else dense
        for buffer in module._buffers.values():
            if buffer is not None and group is not None and group.size() > 1:
                broadcast_first_bytes(buffer, Axes(group), device)


def _announce(model: nn.Module, dense: dist.ProcessGroup | None, expert: dist.ProcessGroup | None) -> None:
    """Megatron reads the axis sizes from configs, too: for the gradient fence, and for its counts of ranks."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "gtp_weight_remat_size")}
    for config in configs.values():
        config.gtp_weight_remat_size = dense.size() if dense is not None else 1
        config.expert_gtp_weight_remat_size = expert.size() if expert is not None else 1
        config.tensor_parallel_num_weight_shards = config.tensor_model_parallel_size * config.gtp_weight_remat_size
        config.expert_tensor_parallel_num_weight_shards = (
            config.expert_tensor_parallel_size * config.expert_gtp_weight_remat_size
        )

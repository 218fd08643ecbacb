"""Which runtime a weight joins while Megatron builds a model.

Megatron hands over weights module by module, from inside the constructors, before there is a model.

[Note: one runtime per model] The model is there all the same: it is the outermost module whose constructor is running,
and its frame is on the stack. So the runtime is made for that module, hangs off it, and is shared by all weights that
are built below it. Nothing outside the model remembers it: two models in one process, or one built ten times, never
meet.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from gtp.config import GTPConfig
from gtp.megatron.experts import balance_expert_gradients, gtp_axes, per_token_loss
from gtp.megatron.param_sync import wait_for_param_sync
from gtp.megatron.refusals import refuse_settings
from gtp.megatron.tied import accept_supplied_weights
from gtp.megatron.weight import MegatronGTPWeight
from gtp.runtime.runtime import GTPRuntime
from gtp.runtime.select import choose_transport
from gtp.weights.axes import Axes
from gtp.weights.layout import ShardLayout
from gtp.weights.rows import ShardRows
from gtp.weights.shard import convert, new_group
from gtp.weights.shard_tensor import CheckpointableShard
from gtp.weights.state_dict import hook_state_dict

_ATTRIBUTE = "gtp_runtime"
_COMPLETION = "gtp_completion"


def under_construction() -> Iterator[nn.Module]:
    """The modules whose constructors are running in this thread, innermost first. A module may come several times."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                yield owner
        if frame.f_back is None:
            break
        frame = frame.f_back


def root_under_construction(module: nn.Module) -> nn.Module:
    """The outermost module whose constructor is running in this thread, or `module` if none is."""
    root = module
    for owner in under_construction():
        root = owner
    return root


def runtime_for(
    root: nn.Module, config: GTPConfig, process_group: dist.ProcessGroup, device: torch.device
) -> GTPRuntime:
    """The runtime of `root`, made at the first call."""
    runtime = root.__dict__.get(_ATTRIBUTE)
    if runtime is None:
        transport, reason = choose_transport(config, _gtp_groups(process_group), device)
        runtime = GTPRuntime(model_config(config, root), transport, device, reason)
        # hooks in order: what completes the model and its shards comes before the forward begins for the runtime
        root.__dict__[_COMPLETION] = completion = _Completion(root)
        root.register_forward_pre_hook(lambda module, args: completion())
        wait_for_param_sync(root, runtime)
        runtime.attach(root)
        root.__dict__[_ATTRIBUTE] = runtime
    return cast(GTPRuntime, runtime)


def _gtp_groups(process_group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Every group that weights of this job may lie on: that of the first weight, the dense and the expert axis."""
    others = [axis for axis in gtp_axes() if axis is not None and axis.size() > 1]
    return list(dict.fromkeys([process_group, *others]))


def device_for(shard: torch.Tensor, process_group: dist.ProcessGroup) -> torch.device:
    """Where a shard lives: the current CUDA device under NCCL, even if Megatron initialized the weight on the CPU."""
    if "nccl" in dist.get_backend(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return shard.device


def adopt(
    root: nn.Module,
    module: nn.Module,
    names: Sequence[str],
    shards: Sequence[tuple[ShardLayout, torch.Tensor]],
    runtime: GTPRuntime,
    process_group: dist.ProcessGroup,
) -> list[MegatronGTPWeight]:
    """Turns parameters of `module` into one weight group of `runtime`, leader first.

    The parameters stay the same objects, so every attribute that Megatron put on them stays too.

    Args:
        root: Of the model, which has the runtime.
        names: Parameter names in `module`.
        shards: Per name, layout and this rank's shard.
    """
    label = type(module).__name__
    weights = [(f"{label}.{name}", layout, shard) for name, (layout, shard) in zip(names, shards, strict=True)]
    group = new_group(runtime, weights, Axes(process_group))
    adopted = []
    for position, (name, (layout, _)) in enumerate(zip(names, shards, strict=True)):
        parameter = module.get_parameter(name)
        weight = cast(MegatronGTPWeight, convert(parameter, runtime, group, position, layout, MegatronGTPWeight))
        weight.before_first_use = root.__dict__[_COMPLETION]
        adopted.append(weight)
    module.register_load_state_dict_pre_hook(_mark_rows)  # first: what comes next takes plain tensors for whole weights
    hook_state_dict(module)
    return adopted


def _mark_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Megatron's checkpoints load each rank's rows, plain."""
    for name, weight in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(weight, MegatronGTPWeight) or not isinstance(value, torch.Tensor):
            continue
        if value.shape == weight.shape and not isinstance(value, CheckpointableShard):
            state_dict[prefix + name] = ShardRows.of(value.detach(), weight.origin)


def complete(root: nn.Module) -> None:
    """The model is built: weights get their names, gradients their scale, tied output layers their weight.

    Raises:
        UnsupportedError, GTPValueError: it holds axes that cannot work, or its configs a setting that is not served.
    """
    for module in root.modules():  # configs were looked at when weights were handed over, and may have changed since
        refuse_settings(getattr(module, "config", None))
    accept_supplied_weights(root)
    runtime = root.__dict__[_ATTRIBUTE]
    runtime.config = model_config(runtime.config, root)
    balance_expert_gradients(root)
    for name, weight in root.named_parameters():
        if isinstance(weight, MegatronGTPWeight):
            weight.before_first_use = None
            handle = weight.handle
            handle.name = handle.member.name = name
            if handle.position == 0:
                others = len(handle.group.members) - 1
                handle.group.name = name if others == 0 else f"{name} (+{others})"
    _look_a_block_ahead(runtime)


def _look_a_block_ahead(runtime: GTPRuntime) -> None:
    """Where the settings leave the prefetch budget open, it holds the largest layer, experts and all.

    A few weights ahead is a layer ahead in a dense model, and a fraction of one where experts are weights of their own.
    """
    if runtime.config.prefetch_bytes is None:
        layers: collections.Counter[str] = collections.Counter()
        for group in runtime.groups:
            layer = re.match(r"(.*\blayers\.\d+)\.", group.name)
            if layer is not None:
                layers[layer[1]] += group.gathered_nbytes
        mean = sum(group.gathered_nbytes for group in runtime.groups) // max(len(runtime.groups), 1)
        runtime.config = dataclasses.replace(runtime.config, prefetch_bytes=max(4 * mean, *layers.values(), 0))


class _Completion:
    """What can be done only when the constructor has returned: `complete`, once. At the first forward of the model, or
    at the first use of a weight, for somebody may call parts of the model and never the whole."""

    def __init__(self, root: nn.Module) -> None:
        self._root: weakref.ref[nn.Module] | None = weakref.ref(root)

    def __call__(self) -> None:
        root = None if self._root is None else self._root()
        if root is not None:
            complete(root)
            self._root = None


def model_config(config: GTPConfig, root: nn.Module) -> GTPConfig:
    """The settings of one model: its loss normalization decides whether gradients are averaged or added."""
    return dataclasses.replace(config, grad_reduce="sum" if per_token_loss(root) else "mean")

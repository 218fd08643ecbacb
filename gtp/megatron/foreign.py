"""Layers that compute with weights nobody gathers, refused where the model is built.

`watch` has torch look whenever a module becomes part of another one, so a layer of any spec, however deep, is seen the
moment it is built, and one that is put in later when it is put in. So are configs that ask for axes which are not up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Final

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from gtp.errors import UnsupportedError
from gtp.megatron.building import under_construction
from gtp.megatron.experts import gtp_axes
from gtp.megatron.refusals import refuse_other_axes
from gtp.megatron.weight import MegatronGTPWeight

_LINEAR: Final = re.compile(r"linear_\w+|\w+_proj")
"""What Megatron's specs call a linear."""

_SHARDED_BY_MEGATRON: Final = ("megatron.core.tensor_parallel.", "megatron.core.extensions.transformer_engine")
"""Where Megatron defines the linears that hand their weights over when there is a GTP axis for them."""

_READERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TEFusedMLP": "its operations read the weights of its linears as they are stored, and a rank stores a part. "
        "Build the layer spec with use_te_op_fuser=False",
        "AbsorbedMLASelfAttention": "its forward reads the weight of its linear_kv_up_proj as it is stored, and a rank "
        "stores a part. Use MLASelfAttention in the layer spec",
        "FusedMLASelfAttention": "its checkpoints split the weight of its linear_qkv_down_proj as it is stored, and a "
        "rank stores a part. Build the layer spec with mla_down_proj_fusion=False",
    }
)
"""Class of Megatron to why its linears' weights cannot be sharded, and what to do."""

_EXPERTS: Final = "megatron.core.transformer.moe.experts"
"""Where Megatron defines what holds experts, whose weights are for the expert axis."""


def watch() -> RemovableHandle:
    """Has every model built from now on checked: its configs, and while a GTP axis is up its layers."""

    def registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if not isinstance(module, nn.Module):
            return
        refuse_other_axes(getattr(module, "config", None))
        if any(axis is not None and axis.size() > 1 for axis in gtp_axes()):
            # a layer that is put in later has siblings that know
            of_experts = any(map(_holds_experts, (owner, *under_construction()))) or any(
                getattr(sibling, "is_expert", False) for sibling in owner.children()
            )
            _refuse_foreign(owner, name, module, of_experts)

    return register_module_module_registration_hook(registered)


def refuse_foreign_in(model: nn.Module) -> None:
    """Checks every layer of a model that was built while no GTP axis was up.

    Raises:
        UnsupportedError: as when it is built, see `watch`.
    """
    of_experts = modules_of_experts(model)
    for owner in model.modules():
        for name, module in owner.named_children():
            _refuse_foreign(owner, name, module, owner in of_experts)


def modules_of_experts(model: nn.Module) -> set[nn.Module]:
    """Those below what holds experts, whose parameters and buffers differ between ranks of expert parallelism."""
    return {module for holder in model.modules() if _holds_experts(holder) for module in holder.modules()}


def _refuse_foreign(owner: nn.Module, name: str, module: nn.Module, of_experts: bool) -> None:
    """Checks `module`, which is or becomes `owner.name`, if a layer spec says what `owner.name` is.

    Raises:
        UnsupportedError: it computes with weights that it asks nobody to gather, or holds a linear's weight whole that
            its axis, the dense or the expert one, is there to shard. The message names it.
    """
    where = f"{type(owner).__name__}.{name} is a {type(module).__name__}"
    axis = gtp_axes()[of_experts]
    if axis is not None and axis.size() > 1 and _LINEAR.fullmatch(name) and name in _spec_fields(type(owner).__mro__):
        matrix = next((p for p in module.parameters() if p.dim() > 1), None)
        if matrix is not None and not any(_is_sharded_by_megatron(m) for m in module.modules()):
            setting = f"{'expert_' if of_experts else ''}tensor_parallel_num_weight_shards"
            raise UnsupportedError(
                f"{where}, which asks nobody to shard its weight: with {setting} every rank "
                f"would hold all of {tuple(matrix.shape)}. Use ColumnParallelLinear or RowParallelLinear, or Megatron's"
                " own layers over Transformer Engine's linears, in the layer spec"
            )
    why = next((_READERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _READERS), None)
    if why is not None and any(isinstance(p, MegatronGTPWeight) for p in module.parameters()):
        raise UnsupportedError(f"{where}: {why}")


def _holds_experts(module: nn.Module) -> bool:
    return any(base.__module__ == _EXPERTS for base in type(module).__mro__)


def _spec_fields(kinds: tuple[type, ...]) -> frozenset[str]:
    """What layer specs fill in a module: the fields of the `...Submodules` beside the classes of Megatron it is of."""
    beside = [
        thing
        for module in {base.__module__ for base in kinds if base.__module__.startswith("megatron.core.")}
        for thing in vars(sys.modules[module]).values()
        if isinstance(thing, type) and thing.__module__ == module and thing.__name__.endswith("Submodules")
    ]
    return frozenset(field.name for thing in beside if is_dataclass(thing) for field in fields(thing))


def _is_sharded_by_megatron(module: nn.Module) -> bool:
    if any(isinstance(p, MegatronGTPWeight) for p in module.parameters(recurse=False)):
        return True
    return any(base.__module__.startswith(_SHARDED_BY_MEGATRON) for base in type(module).__mro__)

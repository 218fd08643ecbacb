"""Names of a model's parameters as checkpoints spell them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gtp.weights.parameter import GTPWeight

# torch.compile and torch's activation checkpoint wrapper put these into names; checkpoints leave them out.
_WRAPPERS = frozenset(["_orig_mod", "_checkpoint_wrapped_module"])


def parameter_names(model: nn.Module) -> dict[int, str]:
    """`id(parameter)` to name. A tied parameter has its first name, as in `named_parameters`."""
    return {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}


def held_weights(model: nn.Module) -> list[GTPWeight]:
    """Its sharded weights."""
    return [parameter for parameter in model.parameters() if isinstance(parameter, GTPWeight)]


def plain_name(name: str) -> str:
    """A name without the parts that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, or the model."""
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model

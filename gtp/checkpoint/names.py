"""Names of a model's parameters as checkpoints spell them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch.compile and torch's activation checkpoint wrapper put these into names; checkpoints leave them out.
_WRAPPERS = frozenset(["_orig_mod", "_checkpoint_wrapped_module"])


def parameter_names(model: nn.Module) -> dict[int, str]:
    """`id(parameter)` to name. A tied parameter has its first name, as in `named_parameters`."""
    if isinstance(model, DistributedDataParallel):
        return parameter_names(model.module)
    return {
        id(parameter): ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        for name, parameter in model.named_parameters()
    }

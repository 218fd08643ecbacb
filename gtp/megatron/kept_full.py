"""Transformer Engine's LayerNormLinear keeps what it gathered on its graph node until backward, and never reads it.

That would be the full weights of half a model's linears at once, and sharding would save nothing where memory peaks. So
for its forward it is given an alias of the gathered tensor. Afterwards the alias, which stays the object that it is and
of its shape, is NaN over memory of one element, and the gathered memory is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from gtp.megatron.weight import MegatronGTPWeight
from gtp.weights.forwards import wrap_forward

_KEEPER: Final = "LayerNormLinear"


def let_go_after_forward(module: nn.Module, weight: MegatronGTPWeight) -> None:
    """Does so if `module`, of Transformer Engine, is such a layer over `weight`."""
    if not any(base.__name__ == _KEEPER for base in type(module).__mro__):
        return
    nothing = weight.plain_shard().new_full((), torch.nan, dtype=weight.handle.group.compute_dtype)

    def run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lent: list[tuple[torch.Tensor, torch.Tensor]] = []
        weight.lent = lent
        try:
            return forward(*args, **kwargs)
        finally:
            weight.lent = None
            for _, alias in lent:
                alias.data = nothing.expand(alias.shape)

    wrap_forward(module, run)

"""Linears whose weight is frozen: Megatron's own keep the full weight from forward to backward, ours gather it again.

With a frozen base model and adapters that would be every full weight of the model at once, and sharding would save
nothing where memory peaks. A weight is frozen, or it is in one use: `Detached`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from gtp.megatron.weight import MegatronGTPWeight
from gtp.ops.versions import ShardVersions


class Detached:
    """`weight.detach()` of a sharded weight, where a linear of Megatron multiplies by it: gathered, and not trained."""

    requires_grad = False

    def __init__(self, weight: MegatronGTPWeight) -> None:
        self.weight = weight

    def all_gather_and_prefetch(self, fwd: bool = True) -> torch.Tensor:
        """The full weight for a forward GEMM."""
        full: torch.Tensor = self.weight.all_gather_and_prefetch(fwd)
        return full.requires_grad_(False)


def _gathered_again(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Before `linear_with_frozen_weight`, which saves one tensor for backward: the full weight, for the dgrad GEMM."""

    @functools.wraps(original)
    def linear(input: torch.Tensor, weight: Any, *args: Any, **options: Any) -> torch.Tensor:
        sharded = weight.weight if isinstance(weight, Detached) else weight
        if not isinstance(sharded, MegatronGTPWeight):
            return original(input, weight, *args, **options)
        versions = ShardVersions([sharded])

        def gather_again(_: None) -> torch.Tensor:
            versions.check([sharded])
            full: torch.Tensor = sharded.all_gather_and_prefetch_bwd()
            return full

        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, gather_again):
            return original(input, weight, *args, **options)

    return linear


WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {"linear_with_frozen_weight": _gathered_again}
)
"""Name of a function of Megatron to what makes its replacement from it."""

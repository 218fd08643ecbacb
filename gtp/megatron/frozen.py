"""Linears whose weight is frozen: Megatron's own keep the full weight from forward to backward, ours gather it again.

With a frozen base model and adapters that would be every full weight of the model at once, and sharding would save
nothing where memory peaks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from gtp.megatron.weight import MegatronGTPWeight
from gtp.ops.versions import ShardVersions


def _gathered_again(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Before `linear_with_frozen_weight`, which saves one tensor for backward: the full weight, for the dgrad GEMM."""

    @functools.wraps(original)
    def linear(input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not isinstance(weight, MegatronGTPWeight):
            return original(input, weight, *args, **options)
        versions = ShardVersions([weight])

        def gather_again(_: None) -> torch.Tensor:
            versions.check([weight])
            full: torch.Tensor = weight.all_gather_and_prefetch_bwd()
            return full

        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, gather_again):
            return original(input, weight, *args, **options)

    return linear


WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {"linear_with_frozen_weight": _gathered_again}
)
"""Name of a function of Megatron to what makes its replacement from it."""

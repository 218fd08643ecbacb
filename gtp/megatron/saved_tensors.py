"""Saved-tensor hooks around a model: activation offloading, non-reentrant checkpointing.

Such hooks hand a detached tensor back in place of what was saved, and of a detached shard nobody knows that it is one.
Megatron's own linears, which save their weight, keep sharded ones beside what is saved, as gtp's do. Inside of
Transformer Engine's there is no place for that, so hooks around them are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from gtp.errors import UnsupportedError
from gtp.megatron.weight import MegatronGTPWeight
from gtp.ops.versions import ShardVersions
from gtp.weights.forwards import wrap_forward


class _KeepsWeight:
    """The context of Megatron's function, as the function sees it: saving the sharded weight keeps the object."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def save_for_backward(self, input: torch.Tensor, weight: MegatronGTPWeight) -> None:
        self._ctx.save_for_backward(input)
        self._ctx.kept_weight, self._ctx.kept_version = weight, ShardVersions([weight])

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, MegatronGTPWeight]:
        """
        Raises:
            GTPStateError: the weight was written since the forward.
        """
        (input,), weight = self._ctx.saved_tensors, self._ctx.kept_weight
        self._ctx.kept_version.check([weight])
        return input, weight


def _keeping_weights(original: Any) -> Any:
    """In place of `LinearWithGradAccumulationAndAsyncCommunication`."""

    class LinearWithGradAccumulationAndAsyncCommunication(original):  # type: ignore[misc]  # its graph node's name
        __wrapped__ = original
        __module__ = original.__module__

        @staticmethod
        def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
            ctx.keeps_weight = isinstance(weight, MegatronGTPWeight)
            return original.forward(_KeepsWeight(ctx) if ctx.keeps_weight else ctx, input, weight, *args)

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            return original.backward(_KeepsWeight(ctx) if ctx.keeps_weight else ctx, grad_output)

    return LinearWithGradAccumulationAndAsyncCommunication


def refuse_hooks_around(module: nn.Module) -> None:
    """Has the forward of `module`, one of Transformer Engine's whose weights are sharded, look for saved-tensor hooks.

    Raises:
        UnsupportedError: its config asks for `cpu_offloading`, which is such hooks.
    """
    who = type(module).__name__
    why = (
        f"{who} saves its weight for backward, and saved-tensor hooks would hand back this rank's rows of it as if "
        "they were the weight"
    )
    if getattr(getattr(module, "config", None), "cpu_offloading", False):
        raise UnsupportedError(
            f"cpu_offloading=True with tensor_parallel_num_weight_shards: {why}. Turn it off, or use the local layer "
            "spec; recompute_granularity saves memory, too"
        )

    def run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{who} was called inside saved-tensor hooks (torch.autograd.graph.save_on_cpu, "
                "fine_grained_activation_offloading of this module, torch.utils.checkpoint with use_reentrant=False, "
                f"...): {why}. Leave the module out of them, or use the local layer spec or Megatron's recomputation"
            )
        return forward(*args, **kwargs)

    wrap_forward(module, run)


WRAPPERS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"LinearWithGradAccumulationAndAsyncCommunication": _keeping_weights}
)
"""Name of a class of Megatron to what makes its replacement from it."""

"""The full weight as a tensor of autograd: what is computed from it by any function reaches the shard's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from gtp.errors import GTPStateError
from gtp.ops import is_wanted, refuse_double_backward
from gtp.ops._common import refuse_sparse
from gtp.ops.compilers import never_compiled

if TYPE_CHECKING:
    from gtp.weights.parameter import GTPWeight, WeightHandle


class _FullTensor(torch.autograd.Function):
    """Shard `[shard_rows, *trailing]` to full weight; backward reduces the full gradient as it does a wgrad."""

    @staticmethod
    def forward(ctx: Any, weight: GTPWeight) -> torch.Tensor:
        ctx.weight = weight
        return weight.gathered()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        handle: WeightHandle = ctx.weight.handle
        refuse_double_backward([ctx.weight])
        if not is_wanted(ctx, 0):
            return None
        refuse_sparse(ctx.weight, grad)
        wgrads: list[torch.Tensor | None] = [None] * len(handle.group.members)
        wgrads[handle.position] = grad.clone()  # others may be reading it, and whoever finalizes may scale in place
        outcomes = _leader(handle).finalize_group_grads(wgrads)
        if outcomes is None or isinstance(outcomes, torch.Tensor):
            return outcomes
        return outcomes[handle.position]


def _leader(handle: WeightHandle) -> GTPWeight:
    """The weight that answers for the group."""
    member = handle.group.members[0]
    leader = member.owner()
    if leader is None:
        raise GTPStateError(f"{member.name}: it was deleted, and {handle.name} is gathered together with it")
    return cast("GTPWeight", leader)


differentiable_full_tensor = cast("Callable[[GTPWeight], torch.Tensor]", _FullTensor.apply)

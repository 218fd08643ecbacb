"""`DistributedWeight`: what a weight must do so that a GEMM can run on it while somebody else owns its shards.

Transformer Engine (>= 2.19) declares a protocol of the same name with the same members. The two are structurally
identical on purpose: a class that satisfies one satisfies the other.

Words: a *shard* is the parameter as registered, this rank's rows. A *full* weight has the logical shape, without
padding. A *group* is one or more weights gathered together (Linear: one; GroupedLinear: one per expert); its first
weight is the *leader* and answers for all.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from typing_extensions import Protocol, runtime_checkable


class Outcome(enum.Enum):
    """What became of one weight's gradient in `finalize_group_grads`. There is nothing else.

    READY: a tensor of the shard's shape was returned. Autograd accumulates it into `.grad`.
    DEFERRED: `None` was returned. The implementer accumulates, into `.grad` or `.main_grad`, before backward ends.
    IN_MAIN_GRAD: a placeholder of the shard's shape was returned and `grad_added_to_main_grad` is True on the
        weight. The gradient is in `main_grad` already; the placeholder's values mean nothing.
    """

    READY = "ready"
    DEFERRED = "deferred"
    IN_MAIN_GRAD = "in_main_grad"


@runtime_checkable
class DistributedWeight(Protocol):
    """A weight that is materialized just before its GEMM. Implementers must be `torch.Tensor` subclasses.

    The contract beyond the signatures: full weights are plain tensors (not distributed themselves), contiguous, with
    the logical shape `[rows, *shard.shape[1:]]`; they are not to be written, and may be read until their last reference
    goes or a shard of the group is written, whichever is first; a materialize may be called any number of times per
    finalize, and its answer may be left unused.
    """

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """The full weight for the forward GEMM; a list with one per weight where the group has several."""
        ...

    def materialize_group_for_backward(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """The full weight for the dgrad GEMM, in the same form."""
        ...

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor]
    ) -> torch.Tensor | Sequence[torch.Tensor | None] | None:
        """Takes the full wgrads (a bare tensor for a group of one) and returns one outcome per weight."""
        ...

    def grad_buffer(self) -> torch.Tensor:
        """Where the wgrad GEMM of this one weight writes: full logical shape, contiguous, contents undefined."""
        ...

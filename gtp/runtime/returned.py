"""`ReturnedGradients`: gradients of shards that are reduced already, and that autograd brings to the weight itself.

So it is with a layer whose CUDA graph is replayed: the runtime is not there, and the graph returns gradients to
autograd. They lie where the next replay writes, and autograd would make that `.grad`. Nor does it know of `main_grad`,
of what the runtime adds to the same gradient meanwhile on another stream, or of the hooks that wait for the whole. So
`.grad` is set aside while they arrive, and at the end of backward they are delivered like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gtp.runtime.group import ShardOwner


class ReturnedGradients:
    """See the module's header.

    Attributes:
        aside: By weight, in order of arrival, what its `.grad` was.
    """

    def __init__(self) -> None:
        self.aside: dict[ShardOwner, torch.Tensor | None] = {}

    def arrive(self, owner: ShardOwner) -> None:
        """Autograd is about to accumulate one into `.grad`."""
        if owner not in self.aside:
            self.aside[owner] = owner.swap_gradient(None)

    def collect(self) -> list[tuple[ShardOwner, torch.Tensor]]:
        """What this backward has brought; `.grad` is again what it was."""
        arrived, self.aside = self.aside, {}
        both = [(owner, owner.swap_gradient(aside)) for owner, aside in arrived.items()]
        return [(owner, grad) for owner, grad in both if grad is not None]

    def deliver(self, collected: Sequence[tuple[ShardOwner, torch.Tensor]]) -> list[ShardOwner]:
        """Adds them to what the weights have. Returns the owners."""
        targets = [owner.gradient_target() for owner, _ in collected]
        grads = [grad for _, grad in collected]
        with torch.no_grad():
            # one kernel for many on a GPU
            for has_value, write in ((True, torch._foreach_add_), (False, torch._foreach_copy_)):
                which = [i for i, (_, value) in enumerate(targets) if value is has_value]
                if which:
                    write([targets[i][0] for i in which], [grads[i] for i in which])
        for (owner, _), (target, _) in zip(collected, targets, strict=True):
            owner.gradient_delivered(target)
        return [owner for owner, _ in collected]

    def abandon(self) -> None:
        """After a backward that raised: `.grad` is what it was before."""
        for owner, aside in self.aside.items():
            owner.swap_gradient(aside)
        self.aside.clear()

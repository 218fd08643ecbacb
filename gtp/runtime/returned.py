"""`ReturnedGradients`: gradients of shards that are reduced already, and that autograd brings to the weight itself.

So it is with a layer whose CUDA graph is replayed: the runtime is not there, and the graph returns gradients to
autograd. They lie where the next replay writes, and autograd would make that `.grad`. Nor does it know of `main_grad`,
of what the runtime adds to the same gradient meanwhile on another stream, or of the hooks that wait for the whole. So
`.grad` is set aside while autograd accumulates, what it made is copied, and at the end of backward the sum is delivered
like any other.
"""

from __future__ import annotations

import torch

from gtp.runtime.group import ShardOwner


class ReturnedGradients:
    """See the module's header.

    Attributes:
        sums: By weight, in order of arrival, what this backward has brought.
    """

    def __init__(self) -> None:
        self.sums: dict[ShardOwner, torch.Tensor] = {}
        self._aside: dict[ShardOwner, torch.Tensor | None] = {}  # what `.grad` was before autograd accumulates

    def arrives(self, owner: ShardOwner) -> None:
        """Autograd is about to accumulate one into `.grad`."""
        self._aside[owner] = owner.swap_gradient(None)

    def arrived(self, owner: ShardOwner) -> None:
        """It has, if `arrives` was said before."""
        if owner not in self._aside:
            return
        grad = owner.swap_gradient(self._aside.pop(owner))
        if grad is None:
            return
        with torch.no_grad():
            if owner in self.sums:
                self.sums[owner].add_(grad)
            else:
                self.sums[owner] = grad.clone(memory_format=torch.contiguous_format)

    def deliver(self) -> list[ShardOwner]:
        """Adds the sums to what the weights have. Returns the owners."""
        sums, self.sums = self.sums, {}
        for owner, total in sums.items():
            target, has_value = owner.gradient_target()
            if has_value:
                with torch.no_grad():
                    target.add_(total)
            owner.gradient_delivered(target if has_value else total)
        return list(sums)

    def abandon(self) -> None:
        """After a backward that raised: `.grad` is what it was before."""
        for owner, aside in self._aside.items():
            owner.swap_gradient(aside)
        self._aside.clear()
        self.sums.clear()

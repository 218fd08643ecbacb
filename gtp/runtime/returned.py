"""`ReturnedGradients`: gradients of shards that are reduced, and that autograd has in hand.

`torch.autograd.grad` asks for them, and they are returned to it. With a layer whose CUDA graph is replayed it is the
reverse: the runtime is not there, the graph returns gradients to autograd, and autograd brings them to the weight. They
lie where the next replay writes, and autograd would make that `.grad`. Nor does it know of `main_grad`, of what the
runtime adds to the same gradient meanwhile on another stream, or of the hooks that wait for the whole. So `.grad` is
set aside while autograd accumulates, what it made is copied, and at the end of backward the sum is delivered like any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from gtp.runtime.capture import current_capture
from gtp.runtime.group import ShardOwner
from gtp.runtime.parts import Parts
from gtp.runtime.replicated import is_returned


class ReturnedGradients:
    """See the module's header.

    Args:
        parts: Those that are being captured.
        begin_work: To be called before a gradient is set aside.

    Attributes:
        asked: Whether the gradients of backwards are returned to who runs them.
        sums: By weight, in order of arrival, what this backward has brought.
    """

    def __init__(self, parts: Parts, *, begin_work: Callable[[], None]) -> None:
        self._parts = parts
        self._begin_work = begin_work
        self.asked = False
        self.sums: dict[ShardOwner, torch.Tensor] = {}
        self._aside: dict[ShardOwner, torch.Tensor | None] = {}  # what `.grad` was before autograd accumulates

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """Backwards inside hand reduced gradients back to autograd, for `torch.autograd.grad`."""
        before, self.asked = self.asked, True
        try:
            yield
        finally:
            self.asked = before

    def arrives(self, owner: ShardOwner, grad: torch.Tensor) -> torch.Tensor | None:
        """For a hook of autograd's: one is about to be accumulated into `.grad`, or returned.

        Returns:
            The gradient to go on with; None: this one.
        """
        if self._parts.added or current_capture(grad.device):
            return None  # the graph that is captured returns it
        if is_returned(cast("torch.Tensor", owner)):
            return grad.clone()  # the next replay writes where this one is
        self._begin_work()
        self._aside[owner] = owner.swap_gradient(None)
        return None

    def arrived(self, owner: ShardOwner) -> None:
        """For a hook of autograd's, behind `arrives`: it is accumulated, if it was set aside for."""
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

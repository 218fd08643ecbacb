"""`HeldGradient`: what `no_sync` keeps from being reduced, and drops when the user zeroes gradients.

[Note: zeroing what is not there] `optimizer.zero_grad()` reaches what `.grad` shows, and a gradient that is held
unreduced is not there. So while one is held `.grad` is a tensor, of zeros if there was none, and the held part belongs
to it as it is: when it is removed, replaced or zeroed in place, what was held is dropped.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class GradientMark:
    """Recognizes a `.grad` that was neither replaced nor zeroed since."""

    address: int
    version: int

    @staticmethod
    def of(grad: torch.Tensor) -> GradientMark:
        """Of `.grad` as it is now; a plain tensor."""
        return GradientMark(grad.data_ptr(), grad._version)

    def was_zeroed(self, grad: torch.Tensor | None) -> bool:
        """Whether the user has dropped the gradient. Looks at values only if somebody wrote them."""
        if grad is None or grad.data_ptr() != self.address:
            return True
        return grad._version != self.version and not bool(grad.any())


@dataclasses.dataclass(eq=False, slots=True)
class HeldGradient:
    """The local gradient of a replicated parameter, in fp32 or wider."""

    value: torch.Tensor
    mark: GradientMark

    @staticmethod
    def beside(parameter: torch.nn.Parameter, value: torch.Tensor) -> HeldGradient:
        """Holds `value`; gives the parameter a `.grad` of zeros if it has none."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return HeldGradient(value, GradientMark.of(parameter.grad))

    def unless_zeroed(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The value, if `grad`, the parameter's `.grad` by now, was not zeroed since."""
        return None if self.mark.was_zeroed(grad) else self.value

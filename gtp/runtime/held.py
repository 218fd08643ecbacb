"""`HeldGradient`: what `no_sync` keeps from being reduced, and drops when the user zeroes gradients.

[Note: zeroing what is not there] `optimizer.zero_grad()` reaches what `.grad` shows, and a gradient that is held
unreduced is not there. So while one is held `.grad` is a tensor, of zeros if there was none, and the held part belongs
to it as it is: when it is removed, replaced or zeroed in place, what was held is dropped. Zeroed is what was given to
`zero_`, `fill_(0)` or `_foreach_zero_`, and not what happens to be zero: that a rank cannot tell from a scaling, and
ranks would disagree.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

_plain = torch._C.DisableTorchFunctionSubclass


class GradientMark:
    """Sits on the tensor that is some parameter's `.grad`, and hears when it is zeroed in place."""

    __slots__ = ("_zeroed",)

    def __init__(self) -> None:
        self._zeroed = False

    @staticmethod
    def on(parameter: torch.Tensor) -> GradientMark:
        """A new mark on `.grad`, which is there."""
        mark = GradientMark()
        mark.put_on(parameter)
        return mark

    def put_on(self, parameter: torch.Tensor) -> None:
        """Marks `.grad`, which is there. A plain tensor is replaced by a `MarkedGradient` over the same storage."""
        with _plain():
            grad = parameter.grad
            assert grad is not None
            if type(grad) is torch.Tensor:
                grad = torch.Tensor._make_subclass(MarkedGradient, grad)  # no view: those cannot be detached in place
                torch.Tensor.grad.__set__(parameter, grad)  # type: ignore[union-attr]  # as it is, whatever it is of
            grad.gradient_mark = self  # type: ignore[attr-defined]

    def zeroed(self) -> None:
        """Somebody zeroed the tensor."""
        self._zeroed = True

    def was_zeroed(self, parameter: torch.Tensor) -> bool:
        """Whether the user has removed, replaced or zeroed `.grad` since."""
        with _plain():
            grad = parameter.grad
        return self._zeroed or mark_of(grad) is not self


class MarkedGradient(torch.Tensor):
    """A tensor that tells its mark when it is zeroed. All else, and what is computed from it, is plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(kind is not cls for kind in types):
            return NotImplemented  # the other kind has rules of its own
        with _plain():
            result = func(*args, **(kwargs or {}))
            note_zeroing(getattr(func, "__name__", ""), args, kwargs or {})
            mark = mark_of(args[0]) if args else None
            if mark is None or type(result) is not torch.Tensor or result.data_ptr() != args[0].data_ptr():
                return result
            if result.shape != args[0].shape or not result.data_ptr():
                return result
            alias = torch.Tensor._make_subclass(cls, result)  # `.data`, `.detach()`: zeroing it zeroes the gradient
        alias.gradient_mark = mark  # type: ignore[attr-defined]
        return alias

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(plain_gradient(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_gradient(self).__reduce_ex__(protocol)


def mark_of(grad: torch.Tensor | None) -> GradientMark | None:
    """The mark of a tensor, if it has one."""
    return getattr(grad, "gradient_mark", None)


def plain_gradient(grad: torch.Tensor) -> torch.Tensor:
    """What `MarkedGradient` was before it was marked; any other tensor is itself."""
    if type(grad) is not MarkedGradient:
        return grad
    with _plain():
        return torch.Tensor._make_subclass(torch.Tensor, grad)


def note_zeroing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """To be called behind torch functions of tensors that may be marked, with the function's name."""
    if name not in ("zero_", "_foreach_zero_", "fill_") or not args:
        return
    if name == "fill_":
        value = args[1] if len(args) > 1 else kwargs.get("value")
        if isinstance(value, torch.Tensor) or value != 0:
            return
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
        mark = mark_of(tensor)
        if mark is not None:
            mark.zeroed()


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
        return HeldGradient(value, GradientMark.on(parameter))

    def unless_zeroed(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The value, if the parameter's `.grad` was not zeroed since."""
        return None if self.mark.was_zeroed(parameter) else self.value

"""The gradient of a sharded weight: what users see as `.grad`, and where the runtime delivers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from gtp.errors import GTPValueError
from gtp.runtime.held import GradientMark, mark_of, plain_gradient
from gtp.weights.rows import ShardRows
from gtp.weights.shard_tensor import LocalShard, past_torch_function

if TYPE_CHECKING:
    from gtp.weights.parameter import WeightHandle

_plain = torch._C.DisableTorchFunctionSubclass

# The attribute of torch itself, for within `_plain()`.
_get_grad: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]


class ShardWithGradient(LocalShard, torch.Tensor):
    """The part of `GTPWeight` that is about its gradient: this rank's rows of the reduced one."""

    handle: WeightHandle

    # -- what users ask ------------------------------------------------------------------------------------------

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """`hook(weight)` runs at the end of backward: the reduced gradient is in place and shards may be written."""
        removable = RemovableHandle(self.handle.hooks)
        self.handle.hooks[removable.id] = hook
        return removable

    @property
    def grad(self) -> torch.Tensor | None:  # optimizers ask for it three times per weight
        """This rank's rows of the reduced gradient, `ShardRows`; None where there is none."""
        grad: torch.Tensor | None = past_torch_function(_get_grad, (), (self,))
        if type(grad) is torch.Tensor and not self.origin.is_whole:
            return self.wrap_grad(grad)  # put there by autograd (a graphed layer returns its gradients to it)
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            past_torch_function(_set_grad, (), (self, None))
        else:
            self.set_grad(grad)

    @grad.deleter
    def grad(self) -> None:
        past_torch_function(_set_grad, (), (self, None))

    def wrap_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """`.grad` as autograd left it, made `ShardRows` that stay."""
        with _plain():
            wrapped = ShardRows.of(grad, self.origin)
            _set_grad(self, wrapped)
        return wrapped

    def set_grad(self, grad: torch.Tensor) -> None:
        """`weight.grad = grad`: a local tensor of the shard's shape; padding rows are cleared.

        Raises:
            GTPValueError: it has another shape.
        """
        with _plain():
            if grad.shape != self.origin.shape:
                raise GTPValueError(
                    f"{self.handle.name}: .grad of a sharded weight is this rank's rows {self.origin.shape}, got "
                    f"{tuple(grad.shape)}. Of a full gradient take the rows weight.layout.shard_slice, and zeros as "
                    "padding"
                )
            plain = grad.detach().as_subclass(torch.Tensor)
            if self.origin.has_padding:
                plain[self.handle.layout.valid_rows :].zero_()
            _set_grad(self, self.local_state(plain))
            mark = mark_of(grad)
            if mark is not None:  # `weight.grad = weight.grad` replaces nothing
                mark.put_on(self)

    # -- ShardOwner, the runtime's side --------------------------------------------------------------------------

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """Where the reduced gradient goes: `main_grad` if somebody gave the weight one, else `.grad`."""
        main_grad = getattr(self, "main_grad", None)
        with _plain():
            if main_grad is not None:
                return main_grad.view(self.origin.shape).as_subclass(torch.Tensor), True
            grad = _get_grad(self)
            # Without other ranks, uses are added to each other first and then to `.grad`, in autograd's own order. A
            # tensor of the user's that is laid out otherwise is added to at the end: transports write contiguous ones.
            if grad is not None and self.handle.group.size > 1 and grad.is_contiguous():
                return grad.detach().as_subclass(torch.Tensor), True
        return self.new_gradient(), False

    def new_gradient(self) -> torch.Tensor:
        """Fresh memory for a gradient of the shard."""
        with _plain():
            return torch.empty_like(self, dtype=self.handle.grad_dtype, memory_format=torch.contiguous_format)

    def gradient_delivered(self, target: torch.Tensor) -> None:
        """`target` holds this rank's part of the reduced gradient."""
        if getattr(self, "main_grad", None) is not None:
            if hasattr(self, "grad_added_to_main_grad"):
                self.grad_added_to_main_grad = True
            return
        with _plain():
            grad = _get_grad(self)
            if grad is None:
                _set_grad(self, self.new_state(target))
            elif grad.data_ptr() != target.data_ptr():
                # one that was laid out otherwise; or, in a group of one, what autograd accumulated in the meantime
                _set_grad(self, plain_gradient(grad.add_(target)))

    def swap_gradient(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Makes `grad` the `.grad`, as it is, and returns what that was."""
        with _plain():
            before = _get_grad(self)
            _set_grad(self, grad)
        return before

    def mark_held(self) -> GradientMark | None:
        """`.grad` as it is beside a gradient that is held unreduced; zeros if there is none."""
        if getattr(self, "main_grad", None) is not None:
            return None
        with _plain():
            if _get_grad(self) is None:
                _set_grad(self, self.new_state(self.new_gradient().zero_()))
            return GradientMark.on(self)

    def was_zeroed_since(self, mark: GradientMark) -> bool:
        """Whether `.grad` was removed, replaced or zeroed since."""
        return mark.was_zeroed(self)

    def run_gradient_hooks(self) -> None:
        """Runs the hooks of `register_post_accumulate_grad_hook`."""
        for hook in list(self.handle.hooks.values()):
            hook(self)

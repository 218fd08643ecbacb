"""The gradient norm of a whole sharded model, and clipping by it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from gtp.errors import GTPStateError, GTPValueError
from gtp.runtime.replicated import is_replicated
from gtp.weights.agreement import agree
from gtp.weights.norms import global_norms, norm_of
from gtp.weights.parameter import GTPWeight

_plain = torch._C.DisableTorchFunctionSubclass


@torch.no_grad()
def grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as one vector, over the whole model. Collective: one all-reduce per GTP group.

    Sharded gradients count with all ranks' rows and without padding; each replicated one once. `main_grad` is used
    where a weight has one. Infinite and NaN gradients give an infinite and a NaN norm; no other values do, however
    large the power, unless the norm itself is beyond fp32.

    Args:
        parameters: Parameters, sharded or not; those without gradient are skipped.
        norm_type: p of the p-norm; `float("inf")` for the largest element.

    Returns:
        0-d fp32 (fp64 if a gradient is), the same on all ranks. Gradients that no runtime reduces must be so already,
        of which it warns.
    """
    order = float(norm_type)
    if order <= 0:
        raise GTPValueError(f"norm_type must be above 0, got {norm_type!r}")
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    sharded, whole, weights = [], [], []
    foreign: torch.Tensor | None = None
    for parameter in listed:
        grad = local_grad(parameter)
        if grad is None:
            continue
        if isinstance(parameter, GTPWeight):
            weights.append(parameter)
            sharded.append((grad[: parameter.layout.valid_rows], parameter.group))
        else:
            whole.append(grad)
            foreign = foreign if is_replicated(parameter) else parameter
    if foreign is not None and any(weight.group.size() > 1 for weight in weights):
        warnings.warn(
            f"a parameter {tuple(foreign.shape)} beside sharded weights belongs to no sharded model, so gtp does not "
            "reduce its gradient. Unless you do, ranks have different ones, and take different norms: shard a module "
            "that holds the whole model",
            stacklevel=2,
        )
    if not sharded and not whole:
        return torch.zeros(())
    agree(weights, "take the norm of the gradients of")
    device = sharded[0][0].device if sharded else whole[0].device
    norms = global_norms(sharded, order, device) + [norm_of(grad, order).to(device) for grad in whole]
    wide = [norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in norms]
    return norm_of(torch.stack(wide), order)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their norm over the whole model is at most `max_norm`. Collective.

    As `torch.nn.utils.clip_grad_norm_`, which is right on sharded models too but makes one collective per weight.

    Args:
        parameters: As for `grad_norm`.
        max_norm: At most this norm is left.
        norm_type: As for `grad_norm`.
        error_if_nonfinite: Raise, on all ranks alike and before any gradient changes, where the norm is infinite or
            NaN. Otherwise an infinite norm scales by zero and a NaN norm makes all gradients NaN, as in torch.
        foreach: Whether gradients of one device and dtype are scaled by one call (True and None) or one by one.

    Returns:
        The norm before clipping, see `grad_norm`.

    Raises:
        GTPStateError: `error_if_nonfinite`, and the norm is not finite.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = grad_norm(listed, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise GTPStateError(
            f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped. Skip this step, "
            "or pass error_if_nonfinite=False to scale all the same"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    alike: dict[Any, list[torch.Tensor]] = {}
    for index, parameter in enumerate(listed):
        grad = local_grad(parameter)
        if grad is not None:
            alike.setdefault(index if foreach is False else (grad.device, grad.dtype), []).append(grad)
    for grads in alike.values():
        torch._foreach_mul_(grads, scale.to(device=grads[0].device, dtype=grads[0].dtype))
    return norm


def local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's gradient as a plain tensor that shares its storage: `main_grad` if there is one, else `.grad`."""
    with _plain():
        grad = parameter.grad
        if isinstance(parameter, GTPWeight) and (target := getattr(parameter, "main_grad", None)) is not None:
            grad = target.view(parameter.layout.shard_shape)  # it may be flat
        return None if grad is None else grad.detach().as_subclass(torch.Tensor)

"""The reference of multi-rank tests: the plain model, trained in one process on every rank's slice of the batch.

Gradients of the slices are computed one after the other and averaged in rank order, as data parallelism does, so at two
ranks a sharded fp32 model must agree bit for bit. `assert_same_parameters` gathers and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gtp

Loss = Callable[[nn.Module, Any], torch.Tensor]


def data_parallel_backward(
    model: nn.Module, batches: Sequence[Any], loss: Loss, *, reduce: str = "mean"
) -> list[torch.Tensor]:
    """Adds the reduced gradient of all ranks' batches to `.grad`, and returns each rank's loss."""
    before = {n: p.grad for n, p in model.named_parameters()}
    totals: dict[str, torch.Tensor] = {}
    losses = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        value = loss(model, batch)
        if value.requires_grad:
            value.backward()
        losses.append(value.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                wide = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                totals[name] = totals[name] + wide if name in totals else wide.clone()
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
        if name in totals:
            total = totals[name] / len(batches) if reduce == "mean" else totals[name]
            old = before[name]
            parameter.grad = (total if old is None else total + old).to(parameter.dtype)
    return losses


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The full value of a parameter, sharded or not."""
    return parameter.full_tensor() if isinstance(parameter, gtp.GTPWeight) else parameter.detach()


def full_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The full gradient of a parameter, sharded or not, without padding."""
    if not isinstance(parameter, gtp.GTPWeight):
        return parameter.grad
    grad = parameter.grad
    if grad is None:
        return None
    local = grad.detach().as_subclass(torch.Tensor).contiguous()
    size = parameter.layout.group_size
    if size == 1:
        return local[: parameter.layout.rows]
    gathered = local.new_empty((local.shape[0] * size, *local.shape[1:]))
    dist.all_gather_into_tensor(gathered, local, group=parameter.group)
    return gathered[: parameter.layout.rows]


def assert_same_parameters(sharded: nn.Module, plain: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Parameters of both models, gathered, are equal; bit for bit unless a tolerance is given."""
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        _assert_same(name, full(parameter), expected[name].detach(), rtol, atol)


def assert_same_gradients(sharded: nn.Module, plain: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Gradients of both models, gathered, are equal; bit for bit unless a tolerance is given."""
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        grad, wanted = full_grad(parameter), expected[name].grad
        assert (grad is None) == (wanted is None), f"{name}: gradient {'missing' if grad is None else 'unexpected'}"
        if grad is not None and wanted is not None:
            _assert_same(f"{name}.grad", grad, wanted, rtol, atol)


def _assert_same(name: str, got: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> None:
    assert got.shape == wanted.shape, f"{name}: {tuple(got.shape)} against {tuple(wanted.shape)}"
    if rtol == 0.0 and atol == 0.0:
        worst = (got.double() - wanted.double()).abs().max().item() if got.numel() else 0.0
        assert torch.equal(got, wanted), f"{name}: differs by up to {worst}"
    else:
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")

"""What the conformance suite runs: one module twice, over the implementer's weights and over plain ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from gtp.protocol import finalize_weight_grads

ModuleForward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Case:
    """One module twice: over the implementer's weights, and plain.

    Attributes:
        name: For messages.
        module: With the implementer's weights.
        plain: The same with plain ones.
        forward: Runs either.
        weights: Names of the weights of the group, leader first.
    """

    name: str
    module: nn.Module
    plain: nn.Module
    forward: ModuleForward
    weights: list[str]

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of this name in `module`."""
        return cast(torch.Tensor, self.module._parameters[name])


class _FinalizeOnly(torch.autograd.Function):
    """y = x; in backward the weight gets a given wgrad, in memory that nobody holds afterwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, wgrad: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.wgrad = weight, wgrad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = ctx.wgrad.clone()
        (grad,) = finalize_weight_grads([ctx.weight], [own])
        return dy, grad, None


finalize_only = cast(Callable[..., torch.Tensor], _FinalizeOnly.apply)


def on_no_rows(forward: ModuleForward) -> ModuleForward:
    return lambda module, x: forward(module, x[:0])


def assert_same(got: torch.Tensor | None, wanted: torch.Tensor | None, what: str) -> None:
    assert got is not None, f"{what}: missing"
    assert wanted is not None, f"{what}: not expected"
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    if not torch.equal(got.to(wanted.dtype), wanted):
        worst = (got.double() - wanted.double()).abs().max().item()
        raise AssertionError(f"{what}: differs by up to {worst} from what plain weights give")

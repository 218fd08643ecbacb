"""What tests of ops over managed weights share: a fake that changes no number, and the run of torch to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gtp.testing.fakes import FakeDistributedWeight


def exact_fake(full: torch.Tensor, **options: Any) -> FakeDistributedWeight:
    """A fake whose full weights and gradients are the plain weight's, over all rows unless told otherwise."""
    return FakeDistributedWeight(full, **{"scale_forward": 1, "scale_backward": 1, "scale_finalize": 1} | options)


def plain_weight(full: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:
    """The same as a plain parameter."""
    return torch.nn.Parameter(full.clone(), requires_grad=requires_grad)


def gradients(
    function: Callable[..., torch.Tensor], dy: torch.Tensor, *inputs: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Output, and the gradients of all inputs: parameters as they are, leaves of the same layout for other tensors."""
    leaves = [i if i is None or isinstance(i, torch.nn.Parameter) else i.detach().requires_grad_() for i in inputs]
    y = function(*leaves)
    y.backward(dy)
    return [y.detach(), *[None if leaf is None else leaf.grad for leaf in leaves]]


def equal(got: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> list[bool]:
    """Pair by pair, whether values and dtypes are the same bits."""
    return [
        (g is None and w is None) or (g is not None and w is not None and g.dtype is w.dtype and torch.equal(g, w))
        for g, w in zip(got, wanted, strict=True)
    ]

"""A node's backward may run a backward of its own, and catch what that raises. What arrived stays; all else goes on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square

WIDTH = 8


class Raises(torch.autograd.Function):
    """The input, whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("a simulated error")


class Trained(torch.autograd.Function):
    """The input. In backward a layer trains on it, by a backward of its own, whose error is caught or not."""

    @staticmethod
    def forward(ctx, x, layer, catch):
        ctx.save_for_backward(x)
        ctx.layer, ctx.catch = layer, catch
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            loss = ctx.layer(x.detach().requires_grad_()).sum()
        try:
            loss.backward()
        except ArithmeticError:
            if not ctx.catch:
                raise
        return grad, None, None


class Inner(nn.Module):
    """Its backward raises half-way, when `second` and `norm` have their gradients and `first` has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.raises = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(self.norm(Raises.apply(h) if self.raises else h))


class Around(nn.Module):
    """A layer whose backward trains `inner`.

    Args:
        before: Whether gradients of this model's own weights arrive before those of `inner`.
        after: Whether they arrive after them.
    """

    def __init__(self, inner: nn.Module, *, before: bool, after: bool) -> None:
        super().__init__()
        self.inner, self.catch = inner, True
        self.below = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) if after else nn.Identity()
        self.above = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) if before else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(Trained.apply(self.below(x), self.inner, self.catch))


PLACES = [(True, True), (True, False), (False, True)]
NESTS = [[place] for place in PLACES] + list(itertools.product(PLACES, repeat=2))


def _every_nest(function):
    for places in NESTS:
        print(f"nest {places}")  # a failing rank's last lines are shown
        function(places)


def _train(places):
    def build():
        model: nn.Module = Inner()
        for before, after in places:
            model = Around(model, before=before, after=after)
        return model

    twins = SideBySide(build, optimizer=None, **ROUNDED)
    for step in range(2):
        twins.backward(inputs(step, 4, WIDTH), loss=_loss)
    innermost = next(m for m in twins.sharded.modules() if isinstance(m, Inner))
    assert (innermost.first.weight.grad is None, innermost.second.weight.grad is None) == (True, False)
    for model in (twins.plain, twins.sharded):
        next(m for m in model.modules() if isinstance(m, Inner)).raises = False
    twins.backward(inputs(9, 4, WIDTH), loss=_loss)


def _loss(model, x):
    return square(model, x.clone().requires_grad_())


def test_a_backward_goes_on_after_an_inner_ones_error(ranks):
    """Of gradients that arrived before the error, inside and outside, none is lost, and none that comes after."""
    ranks(2).run(_every_nest, _train)


def _raise_through(places):
    model: nn.Module = Inner()
    for before, after in places:
        model = Around(model, before=before, after=after)
    twins = SideBySide(lambda: model, optimizer=None, **ROUNDED)
    _set(twins, raises=False, catch=True)
    twins.backward(inputs(0, 4, WIDTH), loss=_loss)
    _set(twins, raises=True, catch=False)
    with pytest.raises(ArithmeticError):
        _loss(twins.sharded, inputs(1, 4, WIDTH)[twins.rank]).backward()
    twins.check_gradients()
    _set(twins, raises=True, catch=True)
    twins.backward(inputs(2, 4, WIDTH), loss=_loss)


def _set(twins, *, raises, catch):
    for module in itertools.chain(twins.plain.modules(), twins.sharded.modules()):
        if isinstance(module, Inner):
            module.raises = raises
        elif isinstance(module, Around):
            module.catch = catch


def test_an_error_that_nobody_catches_delivers_nothing(ranks):
    """`.grad` is what it was before, for sharded and replicated parameters of inner and outer backwards."""
    ranks(2).run(_every_nest, _raise_through)

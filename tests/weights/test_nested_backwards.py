"""Backwards inside of others, which nothing of gtp's shows beforehand: in a node, a hook or another thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square

WIDTH = 8


class Calls(torch.autograd.Function):
    """The input. Its backward calls a function first."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def _raise():
    raise ArithmeticError("a simulated error")


class Branches(nn.Module):
    """One branch checkpoints a norm, whose backward comes first and is all that gtp has seen when the other raises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        other = Calls.apply(h, _raise) if self.raises else h
        return other + checkpoint(self.norm, h, use_reentrant=True)


def _raise_behind_a_checkpoint(zero):
    twins = SideBySide(Branches, optimizer=None, **ROUNDED)
    twins.backward(inputs(0, 4, WIDTH))
    twins.sharded.raises = True
    with pytest.raises(ArithmeticError):
        square(twins.sharded, inputs(1, 4, WIDTH)[twins.rank]).backward()
    twins.check_gradients()
    twins.sharded.raises = False
    if zero:
        for model in (twins.plain, twins.sharded):
            model.zero_grad()
    twins.backward(inputs(2, 4, WIDTH))


@pytest.mark.parametrize("zero", [False, True])
def test_an_error_behind_a_checkpoint_of_replicated_parameters(ranks, zero):
    """`.grad` is at once what it was, and zeroing it then is for good."""
    ranks(2).run(_raise_behind_a_checkpoint, zero)


class Nested(nn.Module):
    """While one of its nodes, or a hook, runs, `inner` trains by itself. Weights follow before and behind."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.below, self.above = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.detach()
        graph = None if self.how == "thread" else self.inner(batch).sum()

        def train(_=None):
            (self.inner(batch).sum() if graph is None else graph).backward()

        def in_thread():
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

        if self.how == "leaf":  # the next node is the input's, which the engine captures and does not run
            return self.above(self.below(batch) + Calls.apply(x, train))
        h = self.below(x)
        if self.how == "hook":
            h.register_hook(train)
            return self.above(h)
        return self.above(Calls.apply(h, in_thread if self.how == "thread" else train))


def _nested(how):
    twins = SideBySide(lambda: Nested(how), **ROUNDED)

    def loss(model, x):
        return square(model, x.clone().requires_grad_())

    for step in range(3):
        twins.step(inputs(step, 4, WIDTH), loss=loss)


@pytest.mark.parametrize("how", ["node", "hook", "thread", "leaf"])
def test_an_inner_backward_of_a_graph_of_before(ranks, how):
    ranks(2).run(_nested, how)


def _for_the_input(how):
    """The outer one asks for the gradient of the input alone; the inner one trains."""
    twins = SideBySide(lambda: Nested(how), **ROUNDED)

    def backward(model, batch):
        x = batch.clone().requires_grad_()
        (found,) = torch.autograd.grad(square(model, x), x)
        return found

    for step in range(2):
        every = inputs(step, 4, WIDTH)
        twins.plain.zero_grad()
        expected = [backward(twins.plain, batch) for batch in every]
        for parameter in twins.plain.inner.parameters():
            parameter.grad /= twins.size
        torch.testing.assert_close(backward(twins.sharded, every[twins.rank]), expected[twins.rank], **ROUNDED)
        twins.update()


@pytest.mark.parametrize("how", ["node", "leaf"])
def test_an_inner_backward_of_one_for_the_input(ranks, how):
    ranks(2).run(_for_the_input, how)

"""The order in which weights are used may change at any moment, on all ranks alike: results do not, nor does memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import gtp
from gtp.testing.collectives import late_collectives
from gtp.testing.ranks import rank
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, live_count

WIDTH = 32
FULL = WIDTH * WIDTH * 4


class Branch(nn.Module):
    """`A -> (B or C) -> D`, B and C of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.left = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.d(self.b(x) if self.left else self.c(x))


def _flipping_branch(config):
    twins = SideBySide(Branch, config=config)
    live = []
    with late_collectives():
        for step in range(8):
            twins.plain.left = twins.sharded.left = step % 2 == 0
            twins.backward(inputs(step, 3, WIDTH))
            unused = twins.sharded.c if step % 2 == 0 else twins.sharded.b
            assert unused.weight.grad is None
            assert unused.bias.grad is None
            twins.update()
            if step in (3, 7):
                # one of them is the reference's own copy; the rest is bounded by the pools
                live.append(live_count(FULL, 4 + 6 + 6))
    return live


def test_a_branch_that_flips_every_step(ranks):  # C36
    for config in (gtp.GTPConfig(), gtp.GTPConfig(prefetch_bytes=1 << 20, keep_bytes=1 << 20)):
        for early, late in ranks(2).run(_flipping_branch, config):
            assert late <= max(early, 4 + 6 + 6)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, mode: str = "train") -> torch.Tensor:
        for layer in reversed(self.encoder) if mode == "backwards" else self.encoder:
            x = layer(x)
        if mode == "train":
            for layer in self.decoder:
                x = layer(x)
        return x


def _train_and_evaluate():
    twins = SideBySide(Encoder)

    def evaluate(mode, context):
        with context():
            x = inputs(99, 3, WIDTH)[0]
            assert torch.equal(twins.sharded(x, mode), twins.plain(x, mode))
        assert all(p.grad is None for p in twins.sharded.parameters())
        assert not twins.runtime._gatherer._resident

    with late_collectives():
        for step in range(2):
            twins.step(inputs(step, 3, WIDTH))
        evaluate("encode", torch.no_grad)
        evaluate("backwards", torch.no_grad)
        for step in range(2, 4):
            twins.step(inputs(step, 3, WIDTH))
        evaluate("backwards", torch.inference_mode)
        evaluate("encode", torch.inference_mode)
        twins.step(inputs(5, 3, WIDTH))


def test_training_evaluation_and_inference_in_other_orders(ranks):  # C37
    ranks(2).run(_train_and_evaluate)


class Shuffled(nn.Module):
    """Layers dropped, repeated, reordered and cut short, as the seed says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.seed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chance = random.Random(self.seed)
        order = [i for i in range(6) if chance.random() > 0.3]  # stochastic depth
        if chance.random() < 0.3:
            chance.shuffle(order)
        if chance.random() < 0.3:
            order += order[:2]
        if chance.random() < 0.3:
            order = order[: len(order) // 2]  # early exit
        for index in order or [0]:
            x = torch.tanh(self.layers[index](x))
        return x


def _random_orders(config):
    twins = SideBySide(Shuffled, config=config, **ROUNDED)
    with late_collectives():
        for step in range(20):
            twins.plain.seed = twins.sharded.seed = step // 2  # every order twice: the second time it is prefetched
            twins.step(inputs(step, 3, WIDTH))
            if step % 5 == 0:
                with torch.no_grad():
                    x = inputs(step, 3, WIDTH)[rank()]
                    torch.testing.assert_close(twins.sharded(x), twins.plain(x), **ROUNDED)


@pytest.mark.parametrize("keep", [0, 3 * FULL])
def test_random_orders(ranks, keep):
    ranks(2).run(_random_orders, gtp.GTPConfig(keep_bytes=keep))

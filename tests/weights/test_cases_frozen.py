"""Frozen weights: beside adapters that train, and in the gradient's way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.ranks import rank
from tests.reference import full
from tests.weights.side_by_side import SideBySide, adamw, inputs, live_count, square


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it; the adapter's second half begins at zero, as in LoRA."""

    def __init__(self, width: int = 16, inner: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def _adapters(include):
    twins = SideBySide(lambda: nn.Sequential(*[Adapted() for _ in range(6)]), optimizer=adamw, include=include)
    blocks = list(twins.sharded)
    start = [full(block.base.weight).clone() for block in blocks]
    moved = [full(block.down.weight).clone() for block in blocks]
    with collective_log() as log, late_collectives():
        for step in range(3):
            twins.step(inputs(step, 3, 16))
    for block, before, down in zip(blocks, start, moved, strict=True):
        assert torch.equal(full(block.base.weight), before)
        assert block.base.weight.grad is None
        assert block.base.bias.grad is None
        assert not torch.equal(full(block.down.weight), down)
    return sorted({r.shape for r in log.started("all_to_all_single")}), len(log.started("all_to_all_single"))


def test_adapters_beside_frozen_weights_train_in_every_block(ranks):
    """C59."""
    for shapes, count in ranks(2).run(_adapters, None):
        # the wgrads of adapters alone, one each a step
        assert shapes == [(2, 16), (16, 2)]
        assert count == 3 * 12
    # frozen bases sharded, adapters replicated: nothing is exchanged at all
    for shapes, count in ranks(2).run(_adapters, ["*.base.weight"]):
        assert (shapes, count) == ([], 0)


def _thawed():
    """Freezing and thawing between steps, as schedules that unfreeze layer by layer do."""
    twins = SideBySide(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), optimizer=None)
    with late_collectives():
        for step in range(6):
            for model in (twins.plain, twins.sharded):
                for index, layer in enumerate(model):
                    layer.requires_grad_(index >= 3 - step % 4)
                    layer.zero_grad()
            twins.backward(inputs(step, 3, 16))
            assert [layer.weight.grad is not None for layer in twins.sharded] == [i >= 3 - step % 4 for i in range(4)]


def test_layers_that_thaw_one_by_one(ranks):
    """C59."""
    ranks(2).run(_thawed)


WIDTH = 64
FULL = WIDTH * WIDTH * 4
AT_MOST = 6 + 6 + 6  # gathered, wgrads and what they receive, whatever the depth: see test_lifetime


def _between(frozen):
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, *[nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(frozen)], last)


def _in_the_way(frozen):
    twins = SideBySide(lambda: _between(frozen))
    for step in range(3):
        twins.step(inputs(step, 2, WIDTH))
    model, runtime = twins.sharded, twins.runtime
    assert all(layer.weight.grad is None for layer in model[1:-1])
    del twins
    counts = []

    def look(module, args, output):
        output.register_hook(lambda _: counts.append(live_count(FULL, AT_MOST)))

    handles = [layer.register_forward_hook(look) for layer in model]
    with collective_log() as log:
        square(model, inputs(9, 2, WIDTH)[rank()]).backward()
    for handle in handles:
        handle.remove()
    runtime.release()
    reduced = len(log.started("all_to_all_single"))
    consumes = len(runtime.trace())
    return counts, live_count(FULL, 0), reduced, consumes


def test_frozen_weights_in_the_gradients_way_come_and_go(ranks):
    """C60."""
    for frozen in (6, 14):
        for counts, left, reduced, consumes in ranks(2).run(_in_the_way, frozen):
            assert len(counts) == frozen + 2
            assert max(counts) <= AT_MOST
            assert left == 0
            assert reduced == 2
            # each once in forward; again in backward but for the first, whose input needs no gradient
            assert consumes == 2 * frozen + 3


class TwoInputs(nn.Module):
    """A frozen module; one input is used and needs no gradient, the other needs one and is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def mixed(self, used: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.frozen(used)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trained(x)
        return self.head(self.mixed(x, h)) + (0.0 * h if self.training else h)


def _unused_input(train):
    twins = SideBySide(TwoInputs)
    for model in (twins.plain, twins.sharded):
        model.train(train)
    with late_collectives():
        for step in range(3):
            twins.step(inputs(step, 3, 16))
    assert twins.sharded.frozen.weight.grad is None
    trace = twins.runtime.trace()
    return [phase for name, phase in trace if name == "frozen.weight"]


@pytest.mark.parametrize("train", [True, False])
def test_a_frozen_module_whose_used_input_needs_no_gradient(ranks, train):
    """C60."""
    # it is not gathered for a backward that it has no part in
    assert ranks(2).run(_unused_input, train) == [["forward"], ["forward"]]


def _all_frozen():
    """A frozen model differentiated by its input, as for adversarial examples or a guidance gradient."""
    torch.manual_seed(3)
    twins = SideBySide(lambda: _between(2).requires_grad_(False), optimizer=None)
    for step in range(2):
        x = inputs(step, 2, WIDTH)[rank()]
        grads = []
        for model in (twins.plain, twins.sharded):
            leaf = x.clone().requires_grad_()
            square(model, leaf).backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)
    assert all(p.grad is None for p in twins.sharded.parameters())
    return isinstance(twins.sharded[0].weight, gtp.GTPWeight) and dist.get_world_size() == 2


def test_a_frozen_model_gives_its_input_the_right_gradient(ranks):
    """C60."""
    assert ranks(2).run(_all_frozen) == [True, True]

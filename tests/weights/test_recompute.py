"""Activation checkpointing of both kinds: right, and no gather more than the recomputation needs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import gtp
from gtp.modules import GroupedLinear
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.ranks import rank
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square


class Block(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (
            self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        )


class Stack(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.Sequential(*[Block(reentrant) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x))


def _gathers_per_step(reentrant, config):
    twins = SideBySide(lambda: Stack(reentrant), config=config)
    counts = []
    with late_collectives(), collective_log() as log:
        for step in range(4):
            before = len(log.started("all_gather_into_tensor"))
            value = square(twins.sharded, inputs(step, 3, 16)[rank()])
            forward = len(log.started("all_gather_into_tensor")) - before
            value.backward()
            counts.append((forward, len(log.started("all_gather_into_tensor")) - before - forward))
            twins.sharded.zero_grad()
            twins.step(inputs(step, 3, 16))
    return counts


@pytest.mark.parametrize("reentrant", [True, False])
def test_gathers_are_one_forward_and_at_most_two_backward(ranks, reentrant):  # C44
    in_blocks = 4 * 2
    for config in (gtp.GTPConfig(), gtp.GTPConfig(prefetch_bytes=0), gtp.GTPConfig(keep_bytes=4096)):
        for counts in ranks(2).run(_gathers_per_step, reentrant, config):
            for forward, backward in counts[1:]:
                # the first layer's input needs no gradient: it is not gathered in backward; prefetched for backward
                # before forward ends is counted as forward's
                assert 9 <= forward <= 9 + 4
                assert forward + backward <= 9 + 2 * in_blocks
            assert len(set(counts[1:])) == 1, "the count grows or wanders"


class Nested(nn.Module):
    """A checkpoint around checkpointed blocks, run on two inputs in one forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(2))
        self.head = nn.Linear(16, 4)
        self.reentrant = reentrant

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.trunk, x, use_reentrant=self.reentrant))


def _preference(model, pair):
    chosen, rejected = (model(x.requires_grad_()) for x in pair)
    return -torch.nn.functional.logsigmoid(chosen.mean() - rejected.mean())


def _two_forwards(reentrant, build):
    twins = SideBySide(lambda: build(reentrant), **ROUNDED)
    with late_collectives():
        for step in range(3):
            pairs = [x.chunk(2) for x in inputs(step, 6, 16)]
            twins.step([(a.clone(), b.clone()) for a, b in pairs], _preference)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("build", [Stack, Nested])
def test_two_checkpointed_forwards_and_one_backward(ranks, reentrant, build):  # C46
    ranks(2).run(_two_forwards, reentrant, build)


def _whole_model(reentrant):
    """The root itself is checkpointed, and segments of it by torch's own helper."""
    twins = SideBySide(lambda: nn.Sequential(*[Block(None) for _ in range(4)]))

    def loss(model, x):
        x = x.requires_grad_()
        if reentrant is None:
            return checkpoint_sequential(model, 2, x, use_reentrant=False).pow(2).mean()
        return checkpoint(model, x, use_reentrant=reentrant).pow(2).mean()

    with late_collectives():
        for step in range(3):
            twins.step(inputs(step, 3, 16), loss)


def test_checkpointing_the_root(ranks):
    for reentrant in (True, False, None):
        ranks(2).run(_whole_model, reentrant)


def _partial_backward():
    """Gradients by some leaves alone, through recomputed blocks, leave other gradients as they were."""
    model = Stack(False)
    gtp.shard_model(model, dist.group.WORLD)
    x = inputs(0, 3, 16)[rank()].requires_grad_()
    (dx,) = torch.autograd.grad(square(model, x), x)
    assert dx.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


def test_autograd_grad_through_checkpoints_touches_no_weight(ranks):
    ranks(2).run(_partial_backward)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = nn.Linear(16, 24), GroupedLinear(2, 24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.experts(torch.tanh(self.up(x)), [3, x.shape[0] - 3]))


class Selective(nn.Module):
    """Blocks whose checkpoints keep what `saves` says: names of torch's operations, or all."""

    def __init__(self, saves: frozenset[str] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts() for _ in range(3)])
        self.saves = saves

    def _policy(self, ctx, operation, *args, **kwargs):
        kept = self.saves is None or operation.overloadpacket.__name__ in self.saves
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        contexts = functools.partial(create_selective_checkpoint_contexts, self._policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


def _selective(saves):
    # what is kept are views of full weights, which their memory is not to be used for others meanwhile
    twins = SideBySide(lambda: Selective(saves), **ROUNDED)
    with late_collectives():
        for step in range(4):
            twins.step(inputs(step, 8, 16))


@pytest.mark.parametrize("saves", [{"mm", "addmm"}, {"cat", "copy_", "empty", "view", "detach"}, {"t", "tanh"}, None])
def test_selective_checkpoints_see_what_the_model_computes(ranks, saves):
    """And not the runtime's own operations: their number depends on what was gathered ahead, and a policy that keeps
    them would hand one's results to another."""
    ranks(2).run(_selective, None if saves is None else frozenset(saves))

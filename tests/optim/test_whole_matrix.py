"""Optimizers that look beyond elements must not work on one rank's rows without a word."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.errors import UnsupportedError
from gtp.weights.rows import ShardRows


def sharded_with_gradient() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10, bias=False))
    gtp.shard_model(model, dist.group.WORLD)
    model(torch.ones(2, 6)).sum().backward()
    return model


def _refused():
    weight = sharded_with_gradient()[0].weight
    grad = weight.grad
    # what was computed from it element by element is as much a shard as the gradient itself
    direction = (2 * grad.clone() - 1).lerp(torch.zeros(5, 6), 0.5).to(torch.bfloat16)
    assert type(direction) is ShardRows
    assert type(torch._foreach_mul([grad], 2.0)[0]) is ShardRows
    for use in (
        lambda g: g @ g.shard.T,
        lambda g: g.T,
        lambda g: g.t(),
        lambda g: torch.linalg.svd(g),
        lambda g: g.view(-1),
        lambda g: g.isnan().any(),
    ):
        for value in (grad, direction):
            with pytest.raises(UnsupportedError, match="gradient"):
                use(value)
    for optimizer in (torch.optim.Muon([weight]), torch.optim.LBFGS([weight])):
        before = weight.plain_shard().clone()
        with pytest.raises(UnsupportedError, match=r"'0\.weight'.*needs the full weight \(10, 6\).*gtp\.optim\.Muon"):
            optimizer.step(lambda: torch.tensor(1.0))
        assert torch.equal(weight.plain_shard(), before)
    with pytest.raises(UnsupportedError, match=r"'0\.weight': norm needs the full weight"):
        torch.optim.Adafactor([weight]).step()


def test_products_transposes_and_reshapes_of_a_gradient_are_refused(ranks):
    ranks(2).run(_refused)


def _local():
    model = sharded_with_gradient()
    weight = model[0].weight
    local = weight.grad.shard
    assert type(local) is torch.Tensor
    assert (local @ local.T).shape == (5, 5)
    assert local.sum() == 5 * 6 * 2
    rows = weight.grad.detach()
    for state in (torch.zeros_like(weight), torch.zeros_like(weight.grad), rows, rows.clone()):
        assert type(state) is ShardRows
        assert type(state + 1) is ShardRows
        assert state.add_(1) is state
        kept = copy.deepcopy(state)
        assert type(kept) is ShardRows
        assert torch.equal(kept.shard, state.shard)
        with pytest.raises(UnsupportedError, match=r"0\.weight: this is rows .* of \(10, 6\)"):
            pickle.dumps(state)
    assert type(weight.new_zeros(3)) is torch.Tensor
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    states = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(states)
    assert type(optimizer.state[weight]["exp_avg"]) is ShardRows


def test_optimizer_state_computes_locally_and_remembers_its_rows(ranks):
    ranks(2).run(_local)

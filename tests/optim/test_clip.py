"""What `gtp.clip_grad_norm_` takes, and what ranks must do alike. Its numbers: tests/weights/test_lines_clipping.py."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank
from tests.checkpoint.models import local
from tests.weights.side_by_side import inputs, linears, square


def _foreach(dtype):
    model = linears(3, 5, bias=True).to(dtype)
    gtp.shard_model(model, dist.group.WORLD)
    for foreach in (None, True, False):
        model.zero_grad()
        square(model, inputs(0, 3, 5)[rank()].to(dtype)).backward()
        before = [p.grad.detach().clone() for p in model.parameters()]
        norm = gtp.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
        assert norm > 0.01
        scale = (0.01 / (norm + 1e-6)).to(dtype)
        for parameter, grad in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(parameter.grad), local(grad) * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_torchs_arguments(ranks, dtype):
    ranks(2).run(_foreach, dtype)


def _another_gradient_is_missing(use):
    model = linears(3, 6)
    gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(debug=True, debug_timeout=30.0))
    optimizer = gtp.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    square(model, inputs(0, 3, 6)[rank()]).backward()
    model[rank()].weight.grad = None
    with pytest.raises(gtp.DesyncError, match=r"the (gradients|updates) of (1|0)\.weight, 2\.weight; rank"):
        optimizer.step() if use == "muon" else gtp.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("use", ["clip", "muon"])
def test_ranks_that_miss_different_gradients_are_named_by_the_check(ranks, use):
    """Without it two weights of one size are mixed, or the job hangs."""
    ranks(2).run(_another_gradient_is_missing, use)


def _one_weight_for_an_optimizer():
    model = linears(1, 6)
    gtp.shard_model(model, dist.group.WORLD)
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable"):
        torch.optim.AdamW(model[0].weight)
    assert torch.typename(model[0].weight) == "torch.FloatTensor"


def test_errors_of_torch_may_quote_a_weights_type(ranks):
    ranks(2).run(_one_weight_for_an_optimizer)


def _a_head_of_nobody():
    backbone, head = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4)
    gtp.shard_model(backbone, dist.group.WORLD)
    head(backbone(torch.ones(2, 8))).sum().backward()
    with pytest.warns(UserWarning, match=r"a parameter \(4,\) beside sharded weights belongs to no sharded model"):
        gtp.clip_grad_norm_([*backbone.parameters(), head.bias], 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gtp.clip_grad_norm_(backbone.parameters(), 1.0)
        gtp.clip_grad_norm_(head.parameters(), 1.0)


def test_a_parameter_that_no_runtime_reduces_is_warned_of(ranks):
    ranks(2).run(_a_head_of_nobody)

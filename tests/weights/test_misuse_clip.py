"""Norms of any order, and gradients that are not finite: what torch would say of the whole gradient, in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank

INF = float("inf")


def _with_gradients(scale):
    """A sharded model and a plain one with the same gradients, around `scale`, spread over four decades."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD)
    generator = torch.Generator().manual_seed(1)
    for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
        grad = torch.randn(whole.shape, generator=generator) * 10.0 ** torch.randint(-3, 1, whole.shape)
        whole.grad = grad * scale
        set_gradient(mine, whole.grad)
    return sharded, plain


def set_gradient(parameter, whole):
    if not isinstance(parameter, gtp.GTPWeight):
        parameter.grad = whole.clone()
        return
    local = torch.zeros(parameter.layout.shard_shape)
    local[parameter.layout.valid_slice] = whole[parameter.layout.shard_slice]
    parameter.grad = local


def _orders():
    for scale in (1e-8, 1.0, 1e8):
        sharded, plain = _with_gradients(scale)
        every = torch.cat([p.grad.double().flatten() for p in plain.parameters()])
        for order in (0.5, 1.0, 2.0, 3.0, 10.0, 50.0, 400.0, INF):
            wanted = torch.linalg.vector_norm(every / scale, order) * scale
            got = gtp.grad_norm(sharded.parameters(), order)
            assert got > 0
            # sums of 104 fp32 powers; the root of an order below one multiplies their relative error
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)
            for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
                one = torch.linalg.vector_norm(mine.grad, order)
                exact = torch.linalg.vector_norm(whole.grad.double() / scale, order) * scale
                if isinstance(mine, gtp.GTPWeight):
                    torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=0)
            clipped = gtp.clip_grad_norm_(sharded.parameters(), float(wanted) / 2, order)
            assert torch.equal(clipped, got)
            for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
                set_gradient(mine, whole.grad)


def test_norms_of_any_order_stay_in_range(ranks):
    ranks(2).run(_orders)


def _not_finite(value, on_rank):
    for order in (1.0, 2.0, 3.0, 10.0, INF):
        sharded, plain = _with_gradients(1.0)
        row = {0: 0, 1: 8}[on_rank]  # a row of that rank's shard
        plain[0].weight.grad[row, 0] = value
        set_gradient(sharded[0].weight, plain[0].weight.grad)
        before = [torch.Tensor.clone(p.grad) for p in sharded.parameters()]
        with pytest.raises(RuntimeError, match=r"norm of order .* is (inf|nan), so they cannot be clipped"):
            gtp.clip_grad_norm_(sharded.parameters(), 1.0, order, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0, order, error_if_nonfinite=True)
        for parameter, kept in zip(sharded.parameters(), before, strict=True):
            torch.testing.assert_close(_local(parameter.grad), _local(kept), rtol=0, atol=0, equal_nan=True)
        got = gtp.clip_grad_norm_(sharded.parameters(), 1.0, order)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, order)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
            if isinstance(mine, gtp.GTPWeight):
                valid, rows = mine.layout.valid_slice, mine.layout.shard_slice
                torch.testing.assert_close(mine.grad.shard[valid], whole.grad[rows], rtol=0, atol=0, equal_nan=True)
            else:
                torch.testing.assert_close(mine.grad, whole.grad, rtol=0, atol=0, equal_nan=True)
    return rank()


def _local(grad):
    return grad.shard if hasattr(grad, "shard") else grad


@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
def test_gradients_that_are_not_finite_behave_as_in_torch(ranks, value):
    for on_rank in range(2):
        assert ranks(2).run(_not_finite, value, on_rank) == [0, 1]


def _into_main_grad(flat):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 5, bias=False))
    plain = copy.deepcopy(model)
    gtp.shard_model(model, dist.group.WORLD)
    for weight in model.parameters():
        weight.main_grad = torch.zeros(weight.numel()) if flat else torch.zeros_like(weight)
    x = torch.ones(2, 6)
    model(x).sum().backward()
    plain(x).sum().backward()
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    torch.testing.assert_close(gtp.clip_grad_norm_(model.parameters(), float(wanted) / 2), wanted)
    torch.testing.assert_close(gtp.grad_norm(model.parameters()), wanted / 2)  # fp32 rounding of the scale


@pytest.mark.parametrize("flat", [True, False])
def test_a_main_grad_made_after_the_weight_is_reduced_into_and_clipped(ranks, flat):
    ranks(2).run(_into_main_grad, flat)

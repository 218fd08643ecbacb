"""Norms, clipping and gradient scaling are those of the whole model on every rank; optimizers may step in backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank
from tests.reference import assert_same_parameters, data_parallel_backward, full, full_grad
from tests.weights.side_by_side import SideBySide, inputs, square

CLIPPERS = {"gtp": gtp.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}


def _uneven():
    # 10 and 7 rows over 4 ranks: shards of 3, 3, 3, 1 and of 2, 2, 2, 1 rows; two replicated biases
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7))


def _norms(clipper, order):
    """All gradients are 1, in the padding too if anybody looked there; then random ones, against the plain model."""
    clip = CLIPPERS[clipper]
    twins = SideBySide(_uneven)
    count = sum(p.numel() for p in twins.plain.parameters())
    norm = count ** (1 / order) if order != math.inf else 1.0
    for limit, factor in ((norm / 4, 0.25), (2 * norm, 1.0)):
        for parameter in twins.sharded.parameters():
            parameter.grad = torch.ones(parameter.shape)
        got = clip(twins.sharded.parameters(), limit, norm_type=order)
        torch.testing.assert_close(got, torch.tensor(norm))
        for parameter in twins.sharded.parameters():
            # both divide by the norm plus 1e-6
            wanted = torch.full(full(parameter).shape, factor)
            torch.testing.assert_close(full_grad(parameter), wanted, rtol=1e-5, atol=0)
    for model in (twins.plain, twins.sharded):
        model.zero_grad()
    every = inputs(0, 3, 6)
    data_parallel_backward(twins.plain, every, square)
    square(twins.sharded, every[rank()]).backward()
    wanted = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 1e-3, norm_type=order)
    got = clip(twins.sharded.parameters(), 1e-3, norm_type=order)
    # sums over ranks and over elements in another order
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    for name, parameter in twins.sharded.named_parameters():
        torch.testing.assert_close(full_grad(parameter), twins.plain.get_parameter(name).grad, rtol=1e-5, atol=1e-9)
    return got


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("clipper", CLIPPERS)
def test_the_norm_is_that_of_the_whole_model_on_every_rank(ranks, clipper, order):
    """C87."""
    first, *others = ranks(4).run(_norms, clipper, order)
    assert all(torch.equal(first, other) for other in others)


def _foreach_and_parts():
    """torch's loop and foreach forms, one parameter, no gradient at all, a norm that is infinite."""
    twins = SideBySide(_uneven)
    every = inputs(0, 3, 6)
    twins.backward(every, check=False)
    for foreach in (True, False, None):
        models = (twins.plain, twins.sharded)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9, foreach=foreach) for m in models]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    parts = [gtp.clip_grad_norm_(twins.sharded[2].weight, 1e9), torch.linalg.vector_norm(twins.plain[2].weight.grad)]
    torch.testing.assert_close(*parts, rtol=1e-5, atol=0)
    with pytest.raises(gtp.GTPValueError, match="norm_type must be above 0, got 0"):
        gtp.grad_norm(twins.sharded.parameters(), 0)
    if rank() == 1:
        twins.sharded[0].weight.grad.shard[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(twins.sharded.parameters(), 1.0, error_if_nonfinite=True)
    assert gtp.grad_norm(twins.sharded.parameters()).item() == math.inf
    twins.sharded.zero_grad()
    assert gtp.clip_grad_norm_(twins.sharded.parameters(), 1.0).item() == 0.0
    assert gtp.clip_grad_norm_([], 1.0).item() == 0.0


def test_parts_of_a_model_and_infinite_norms(ranks):
    ranks(4).run(_foreach_and_parts)


def _scaled(bad_rank):
    """`GradScaler` halves its scale and skips the step on all ranks when one of them, or its shard, overflowed."""
    twins = SideBySide(_uneven)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    (optimizer,) = twins.optimizers[1:]
    for step in range(4):
        every = inputs(step, 3, 6)
        data_parallel_backward(twins.plain, every, square)
        before = [full(p).clone() for p in twins.sharded.parameters()]
        scaler.scale(square(twins.sharded, every[rank()])).backward()
        overflow = step == 1 and bad_rank is not None
        if overflow and rank() == bad_rank:
            twins.sharded[0].weight.grad.shard[0, 0] = math.inf
        scaler.unscale_(optimizer)
        if not overflow:
            # a power of two: nothing is rounded on the way
            twins.check_gradients()
            gtp.clip_grad_norm_(twins.sharded.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert all(torch.equal(full(p), b) for p, b in zip(twins.sharded.parameters(), before, strict=True))
        else:
            twins.optimizers[0].step()
        for each in twins.optimizers:
            each.zero_grad()
        twins.check_parameters()
    return scaler.get_scale()


@pytest.mark.parametrize("bad_rank, scale", [(None, 1024.0), (0, 512.0), (1, 512.0)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, bad_rank, scale):
    assert ranks(2).run(_scaled, bad_rank) == [scale, scale]


def _overflow_before_the_reduction():
    """An input so large on one rank that its wgrad is infinite: so is every shard of the sum, and all ranks skip."""
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = inputs(0, 3, 6)[rank()] * (1e30 if rank() == 1 else 1.0)
    scaler.scale(square(twins.sharded, x)).backward()
    scaler.step(twins.optimizers[1])
    scaler.update()
    assert_same_parameters(twins.sharded, twins.plain)
    return scaler.get_scale()


def test_an_infinite_loss_on_one_rank_skips_the_step_on_all(ranks):
    assert ranks(2).run(_overflow_before_the_reduction) == [512.0, 512.0]


def _optimizer_in_backward():
    """Each parameter is stepped by its own hook and its gradient freed, microbatch after microbatch."""
    twins = SideBySide(_uneven, optimizer=None)
    order = []
    for model in (twins.plain, twins.sharded):
        for name, parameter in model.named_parameters():
            own = torch.optim.AdamW([parameter], lr=1e-2)

            def step(p, own=own, name=name, model=model):
                assert p.grad is not None
                own.step()
                own.zero_grad()
                if model is twins.sharded:
                    order.append(name)

            if model is twins.sharded:
                parameter.register_post_accumulate_grad_hook(step)
            else:
                parameter.own_step = step
    for number in range(3):
        every = inputs(number, 3, 6)
        data_parallel_backward(twins.plain, every, square)
        for parameter in twins.plain.parameters():
            parameter.own_step(parameter)
        square(twins.sharded, every[rank()]).backward()
        assert all(p.grad is None for p in twins.sharded.parameters())
        twins.check_parameters()
    return order


def test_an_optimizer_in_backward_steps_each_parameter_once(ranks):
    for order in ranks(2).run(_optimizer_in_backward):
        assert len(order) == 3 * 4
        for step in range(3):
            assert sorted(order[4 * step : 4 * step + 4]) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def _hooks_are_removable():
    model = _uneven()
    gtp.shard_model(model, dist.group.WORLD)
    seen = []

    def look(p):
        seen.append(tuple(p.grad.shape))

    handles = [p.register_post_accumulate_grad_hook(look) for p in model.parameters()]
    square(model, inputs(0, 3, 6)[rank()]).backward()
    first = sorted(seen)
    for handle in handles:
        handle.remove()
    square(model, inputs(0, 3, 6)[rank()]).backward()
    return first, len(seen)


def test_hooks_see_reduced_gradients_of_the_shards_shape_until_removed(ranks):
    for shapes, count in ranks(2).run(_hooks_are_removable):
        assert shapes == [(4, 10), (5, 6), (7,), (10,)]
        assert count == 4

"""Gradients that a user asks for, hooks, holds back, zeroes or interrupts: right, or refused with a message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.modules import GroupedLinear
from gtp.testing.collectives import late_collectives
from gtp.testing.ranks import rank
from tests.reference import data_parallel_backward, full_grad
from tests.weights.side_by_side import ROUNDED, SideBySide, adamw, inputs, square


def _model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def _mean_gradients(twins, every):
    """The reduced gradient of every parameter, by name; the plain model's `.grad` is left as it was."""
    before = {n: p.grad for n, p in twins.plain.named_parameters()}
    twins.plain.zero_grad()
    data_parallel_backward(twins.plain, every, square)
    wanted = {n: p.grad for n, p in twins.plain.named_parameters()}
    for name, parameter in twins.plain.named_parameters():
        parameter.grad = before[name]
    return wanted


def _autograd_grad(reduce):
    twins = SideBySide(_model, reduce=reduce, optimizer=None)
    every = inputs(0, 3, 8)
    twins.plain.zero_grad()
    data_parallel_backward(twins.plain, every, square, reduce=reduce)
    wanted = {n: p.grad for n, p in twins.plain.named_parameters()}
    twins.plain.zero_grad()
    named = dict(twins.sharded.named_parameters())
    for names in (["0.bias"], ["1.weight", "2.bias"], list(named)):
        grads = torch.autograd.grad(square(twins.sharded, every[rank()]), [named[n] for n in names])
        for name, grad in zip(names, grads, strict=True):
            if not isinstance(named[name], gtp.GTPWeight):
                assert torch.equal(grad, wanted[name]), name
        assert all(p.grad is None for p in named.values())
    ends_in_norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    gtp.shard_model(ends_in_norm, dist.group.WORLD)
    with pytest.raises(gtp.UnsupportedError, match=r"1\.bias: torch\.autograd\.grad with create_graph=True"):
        torch.autograd.grad(square(ends_in_norm, every[rank()]), [ends_in_norm[1].bias], create_graph=True)
    twins.backward(every)


def test_autograd_grad_returns_reduced_gradients_of_replicated_parameters_too(ranks):
    for reduce in ("mean", "sum"):
        ranks(2).run(_autograd_grad, reduce)


def _hooks_on_replicated():
    twins = SideBySide(_model)
    before = dict(twins.sharded.named_parameters())["0.bias"]
    seen, order = [], []
    for model in (twins.plain, twins.sharded):
        model[2].bias.register_post_accumulate_grad_hook(lambda p: order.append("kept"))
    for step in range(3):
        every = inputs(step, 3, 8)
        wanted = _mean_gradients(twins, every)
        order.clear()
        handles = [
            before.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1]),
            before.register_post_accumulate_grad_hook(lambda p: order.append(p.grad.clone())),
            before.register_post_accumulate_grad_hook(lambda p: order.append("removed")),
        ]
        handles[2].remove()
        square(twins.sharded, every[rank()]).backward()
        assert torch.equal(seen.pop(), wanted["0.bias"])  # a hook sees what data parallelism yields, once
        assert torch.equal(before.grad, 2 * wanted["0.bias"])  # and may change it
        first, second = order
        assert torch.equal(first, 2 * wanted["0.bias"])
        assert second == "kept"
        for handle in handles:
            handle.remove()
        twins.sharded.zero_grad()
        order.clear()
        twins.step(every)
        assert order.count("kept") == 3  # two of the reference's ranks, one of ours
        assert len(seen) == 0


def test_hooks_of_replicated_parameters_see_the_reduced_gradient(ranks):
    ranks(2).run(_hooks_on_replicated)


def _hooked_and_accumulated():
    """A hook on a bias, and gradients held back by no_sync: the hook of the reducing backward sees the sum."""
    twins = SideBySide(_model, **ROUNDED)
    bias, seen = twins.sharded[0].bias, []
    bias.register_hook(lambda g: seen.append(g.clone()))
    every = [inputs(step, 3, 8) for step in range(3)]
    with twins.runtime.no_sync():
        for micro in every[:2]:
            square(twins.sharded, micro[rank()]).backward()
    square(twins.sharded, every[2][rank()]).backward()
    for micro in every:
        data_parallel_backward(twins.plain, micro, square)
    twins.check_gradients()
    torch.testing.assert_close(seen[-1], twins.plain[0].bias.grad, rtol=1e-5, atol=1e-6)  # fp32, another order
    twins.update()


def test_a_hook_sees_what_no_sync_held_back(ranks):
    ranks(2).run(_hooked_and_accumulated)


def _zeroed(set_to_none, earlier):
    twins = SideBySide(_model, **ROUNDED)
    if earlier:
        twins.backward(inputs(5, 3, 8))
    with twins.runtime.no_sync():
        for step in range(2):
            square(twins.sharded, inputs(step, 3, 8)[rank()]).backward()
    for optimizer in twins.optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)
    twins.step(inputs(3, 3, 8))
    # zeroed between two micro-batches of no_sync: the second counts
    with twins.runtime.no_sync():
        square(twins.sharded, inputs(6, 3, 8)[rank()]).backward()
        twins.sharded.zero_grad(set_to_none=set_to_none)
        square(twins.sharded, inputs(7, 3, 8)[rank()]).backward()
    square(twins.sharded, inputs(8, 3, 8)[rank()]).backward()
    for step in (7, 8):
        data_parallel_backward(twins.plain, inputs(step, 3, 8), square)
    twins.check_gradients()
    twins.update()
    assert twins.runtime.stats().unreduced_bytes == 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_no_sync_held(ranks, set_to_none):
    for earlier in (True, False):
        ranks(2).run(_zeroed, set_to_none, earlier)


def _frozen_while_held(what):
    """A gradient that no_sync holds is the parameter's, and stays so when the parameter is frozen before the backward
    that reduces."""
    twins = SideBySide(_model, optimizer=None, **ROUNDED)
    with twins.runtime.no_sync():
        twins.backward(inputs(0, 3, 8), check=False)
    for model in (twins.plain, twins.sharded):
        (model[0].weight if what == "weight" else model[0]).requires_grad_(False)
    twins.backward(inputs(1, 3, 8))
    twins.backward(inputs(2, 3, 8))


@pytest.mark.parametrize("what", ["weight", "layer"])
def test_a_parameter_frozen_while_no_sync_holds_its_gradient_gets_it(ranks, what):
    """C58."""
    ranks(3).run(_frozen_while_held, what)


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.linear = GroupedLinear(3, 6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x)


def _one_expert(number):
    def loss(model, x):
        weight = model.experts.get_parameter(f"weight{number}")
        weight = weight.full_tensor() if isinstance(weight, gtp.GTPWeight) else weight
        return square(model, x) + (x @ weight.t()).square().mean()

    return loss


def _alone_in_its_group():
    """Weight decay and momentum move what has a gradient, if only of zeros."""
    twins = SideBySide(_Experts, optimizer=adamw, **ROUNDED)
    twins.step(inputs(0, 3, 6), _one_expert(1))
    assert twins.sharded.experts.weight0.grad is None
    with twins.runtime.no_sync():
        twins.backward(inputs(1, 3, 6), _one_expert(1), check=False)
    twins.backward(inputs(2, 3, 6), _one_expert(0))
    twins.step(inputs(3, 3, 6), _one_expert(1))
    twins.step(inputs(4, 3, 6))


def test_a_loss_of_one_experts_weight_gives_the_others_no_gradient(ranks):
    """C65."""
    ranks(3).run(_alone_in_its_group)


def _interrupted(with_grad):
    """Ctrl-C in a forward, then an optimizer that writes through aliases, then the next step: right, and prefetched."""
    twins = SideBySide(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]))
    with late_collectives():
        for step in range(3):
            twins.step(inputs(step, 3, 16))

        def interrupt(module, args, output):
            raise KeyboardInterrupt

        handle = twins.sharded[3].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(with_grad):
            twins.sharded(inputs(3, 3, 16)[rank()])
        handle.remove()
        with torch.no_grad():
            for model in (twins.plain, twins.sharded):
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
        twins.step(inputs(4, 3, 16))
        before = twins.runtime.stats()
        twins.step(inputs(5, 3, 16))
        after = twins.runtime.stats()
    return (after.prefetch_hits - before.prefetch_hits) / (after.consumes - before.consumes)


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_step_after_an_interrupted_forward(ranks, with_grad):
    for hits in ranks(2).run(_interrupted, with_grad):
        assert hits > 0.8  # of 11 consumes, the first may be late


class _SparseBag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, **options)
        self.linear = nn.Linear(4, 4)


class _SparseParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(20, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, ids):
        return self.linear(torch.nn.functional.embedding(ids, self.table, sparse=True))


def _sparse():
    for model in (_SparseBag(sparse=True), nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 4))):
        with pytest.raises(gtp.GTPValueError, match=r"sparse=True\) has sparse gradients.*Set sparse=False"):
            gtp.shard_model(model, dist.group.WORLD)
    model = _SparseParameter()
    gtp.shard_model(model, dist.group.WORLD)
    with pytest.raises(gtp.UnsupportedError, match=r"table: its gradient is sparse.*sparse=False"):
        model(torch.tensor([[1, 2]])).sum().backward()


def test_sparse_gradients_are_refused(ranks):
    ranks(2).run(_sparse)


class _Checkpointed(nn.Module):
    """The last block's inner backward runs first, and holds nothing but a norm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        x = checkpoint(lambda t: self.norm(t) * self.scale, x, use_reentrant=True)
        return checkpoint(lambda t: t * self.scale, x, use_reentrant=True)


def _inner_backward_of_norms():
    twins = SideBySide(_Checkpointed, **ROUNDED)
    seen = []
    for layer in twins.sharded.layers:
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(len(ended)))
    twins.sharded.scale.register_post_accumulate_grad_hook(lambda p: seen.append(len(ended)))
    ended = []
    with late_collectives():
        for step in range(3):
            every = [x.requires_grad_() for x in inputs(step, 3, 8)]
            value = square(twins.sharded, every[rank()])
            ended.clear()
            seen.clear()
            every[rank()].register_hook(lambda g: ended.append(1))
            value.backward()
            # hooks run behind the gradient of the model's input, so at the very end and not after an inner backward
            assert seen == [1, 1, 1, 1]
            data_parallel_backward(twins.plain, [x.detach().requires_grad_() for x in every], square)
            twins.check_gradients()
            twins.update()
    assert full_grad(twins.sharded.layers[0].weight) is None


def test_an_inner_backward_that_holds_only_replicated_parameters_does_not_end_the_outer_one(ranks):
    ranks(2).run(_inner_backward_of_norms)

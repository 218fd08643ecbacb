"""What autograd's users may do: several graphs at once, parts of a backward, second derivatives, accumulation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.memory import live_bytes
from gtp.testing.ranks import rank
from tests.reference import data_parallel_backward, full_grad
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, linears, settled, square


def _mlp():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def _several_graphs(order):
    """Forwards of several micro-batches first, then their backwards in this order; the reference does one at a time."""
    twins = SideBySide(_mlp, **ROUNDED)
    with late_collectives():
        for step in range(3):
            micro = [inputs(10 * step + i, 3, 16) for i in range(len(order))]
            losses = [square(twins.sharded, every[rank()]) for every in micro]
            for i in order:
                losses[i].backward()
            for every in micro:
                data_parallel_backward(twins.plain, every, square)
            twins.check_gradients()
            twins.update()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1)])
def test_several_forwards_then_their_backwards(ranks, order):  # C52
    ranks(2).run(_several_graphs, order)


def _interleaved():
    """1F1B: forward of the next micro-batch between the backwards of earlier ones."""
    twins = SideBySide(_mlp, **ROUNDED)
    with late_collectives():
        for step in range(4):
            micro = [inputs(10 * step + i, 3, 16) for i in range(4)]
            first = square(twins.sharded, micro[0][rank()])
            second = square(twins.sharded, micro[1][rank()])
            first.backward()
            third = square(twins.sharded, micro[2][rank()])
            second.backward()
            fourth = square(twins.sharded, micro[3][rank()])
            third.backward()
            fourth.backward()
            for every in micro:
                data_parallel_backward(twins.plain, every, square)
            twins.check_gradients()
            twins.update()
    stats = twins.runtime.stats()
    return stats.prefetch_hits / stats.consumes


def test_one_forward_one_backward_is_prefetched_too(ranks):  # C52
    for hits in ranks(2).run(_interleaved):
        # of 4 x 20 consumes the first step's are late, and afterwards the first behind each of two lines a step
        assert hits > 0.5


def _twice_through_one_graph():
    twins = SideBySide(_mlp, **ROUNDED)
    with late_collectives():
        for step in range(2):
            every = inputs(step, 3, 16)
            loss = square(twins.sharded, every[rank()])
            loss.backward(retain_graph=True)
            loss.backward()
            for _ in range(2):
                data_parallel_backward(twins.plain, every, square)
            twins.check_gradients()
            twins.update()


def test_a_retained_graph_differentiated_twice(ranks):
    ranks(2).run(_twice_through_one_graph)


def _second_derivatives():
    model = _mlp()
    gtp.shard_model(model, dist.group.WORLD)
    x = inputs(0, 3, 16)[rank()].requires_grad_()
    with pytest.raises(gtp.UnsupportedError, match=r"weight '4.weight'.*double backward.*exclude"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    square(model, x.detach()).backward()  # usable afterwards
    assert full_grad(model[0].weight).abs().sum() > 0


def test_double_backward_is_refused_by_name(ranks):  # C54
    ranks(2).run(_second_derivatives)


def _gradient_penalty_with_excluded_layers():
    """The documented way to a gradient penalty: leave the weights on its way unsharded."""

    def loss(model, x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model.critic(x).sum(), x, create_graph=True)
        return g.pow(2).sum() + model.body(x).pow(2).mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
            self.body = nn.Linear(16, 16)

    twins = SideBySide(Model, exclude="critic.*")
    for step in range(3):
        twins.step(inputs(step, 3, 16), loss)


def test_a_gradient_penalty_on_unsharded_layers(ranks):  # C54
    ranks(2).run(_gradient_penalty_with_excluded_layers)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class UnusedFirst(nn.Module):
    """The first layer runs and nothing comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.used(x)


def _inputs_without_gradient(kind):
    if kind == "lookup":
        generator = torch.Generator().manual_seed(1)
        every = [torch.randint(40, (3, 4), generator=generator) for _ in range(dist.get_world_size())]
        twins = SideBySide(Lookup)
    else:
        every = inputs(0, 3, 16)
        twins = SideBySide(UnusedFirst if kind == "unused" else lambda: linears(1, bias=True))
    with late_collectives():
        for _ in range(3):
            twins.backward(every)
            assert not twins.runtime._reducer._in_flight
            assert not twins.runtime._gatherer._resident
            if kind == "unused":
                assert twins.sharded.unused.weight.grad is None
            twins.update()


@pytest.mark.parametrize("kind", ["lookup", "first_linear", "unused"])
def test_gradients_are_there_when_backward_returns(ranks, kind):  # C56
    ranks(2).run(_inputs_without_gradient, kind)


def _accumulation(mode):
    twins = SideBySide(lambda: linears(3, 32, bias=True), **ROUNDED)
    counts, held = [], 0
    for step in range(2):
        with collective_log() as log:
            for micro in range(4):
                every = inputs(10 * step + micro, 3, 32)
                skip = {"every": False, "last": micro < 3, "flipped": micro in (0, 2)}[mode]
                if skip:
                    with twins.runtime.no_sync():
                        twins.backward(every, check=False)
                    held = max(held, twins.runtime.stats().unreduced_bytes)
                else:
                    twins.backward(every, check=False)
        counts.append(len(log.started("all_to_all_single")))
        assert twins.runtime.stats().unreduced_bytes == 0
        twins.check_gradients()
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        twins.check_parameters()
        for parameter in twins.sharded.parameters():
            assert torch.count_nonzero(parameter.grad.detach().as_subclass(torch.Tensor)) == 0
    return counts, held


def test_accumulation_reduces_as_often_as_asked(ranks):  # C58
    full_gradients = 3 * 32 * 32 * 4
    assert ranks(4).run(_accumulation, "every") == [([12, 12], 0)] * 4
    assert ranks(4).run(_accumulation, "last") == [([3, 3], full_gradients)] * 4
    assert ranks(4).run(_accumulation, "flipped") == [([6, 6], full_gradients)] * 4


def _gradient_memory(at_most):
    """Reducing every micro-batch holds shards of gradients: 1/R, and the pools, whatever the number of layers."""
    model = linears(12, 32)
    runtime = gtp.shard_model(model, dist.group.WORLD)
    for micro in range(3):
        square(model, inputs(micro, 3, 32)[rank()]).backward()
    runtime.release()
    return settled(live_bytes, lambda alive: alive <= at_most)


def test_accumulated_gradients_take_one_share(ranks):  # C58
    weights = 12 * 32 * 32 * 4
    at_most = 2 * weights / 4 + 4096  # shards and their gradients; a batch and a seed's generator state
    assert all(alive <= at_most for alive in ranks(4).run(_gradient_memory, at_most))


def _partial(kind):
    torch.manual_seed(3)
    twins = SideBySide(_mlp)
    plain, sharded = twins.plain, twins.sharded
    x = inputs(0, 3, 16)[rank()]
    twins.backward(inputs(1, 3, 16))
    before = {n: full_grad(p).clone() for n, p in sharded.named_parameters()}
    if kind == "grad_of_input":
        leaf = x.clone().requires_grad_()
        (got,) = torch.autograd.grad(square(sharded, leaf), leaf)
        (wanted,) = torch.autograd.grad(square(plain, leaf), leaf)
        assert torch.equal(got, wanted)
        changed = set()
    elif kind == "backward_inputs_weight":
        square(sharded, x).backward(inputs=[sharded[2].weight])
        changed = {"2.weight"}
    elif kind == "backward_inputs_bias":
        square(sharded, x).backward(inputs=[sharded[2].bias])
        changed = {"2.bias"}
    else:
        leaf = x.clone().requires_grad_()
        square(sharded, leaf).backward(inputs=[leaf])
        assert leaf.grad is not None
        changed = set()
    for name, parameter in sharded.named_parameters():
        assert torch.equal(full_grad(parameter), before[name]) == (name not in changed), name


@pytest.mark.parametrize(
    "kind", ["grad_of_input", "backward_inputs_weight", "backward_inputs_bias", "backward_inputs_input"]
)
def test_a_partial_backward_touches_only_what_it_is_asked_for(ranks, kind):
    ranks(2).run(_partial, kind)


def _gradients_returned():
    twins = SideBySide(_mlp, **ROUNDED)
    every = inputs(0, 3, 16)
    weights = [p for p in twins.sharded.parameters() if isinstance(p, gtp.GTPWeight)]
    got = torch.autograd.grad(square(twins.sharded, every[rank()]), weights)
    assert all(p.grad is None for p in twins.sharded.parameters())
    data_parallel_backward(twins.plain, every, square)
    for weight, grad in zip(weights, got, strict=True):
        weight.grad = grad.detach().as_subclass(torch.Tensor)
    for name, parameter in twins.sharded.named_parameters():
        if isinstance(parameter, gtp.GTPWeight):
            torch.testing.assert_close(full_grad(parameter), dict(twins.plain.named_parameters())[name].grad)


def test_autograd_grad_returns_reduced_shards(ranks):
    ranks(2).run(_gradients_returned)


def _by_hand():
    """Submodules called one by one, never the root: weights, biases and norms are reduced all the same."""

    def loss(model, x):
        for layer in model:
            x = layer(x)
        return x.pow(2).mean()

    twins = SideBySide(_mlp)
    with late_collectives():
        for step in range(3):
            twins.step(inputs(step, 3, 16), loss)
        for model in (twins.plain, twins.sharded):
            model[3].requires_grad_(False)
        twins.step(inputs(5, 3, 16), loss)
        for model in (twins.plain, twins.sharded):
            model[3].requires_grad_(True)
        twins.step(inputs(6, 3, 16), loss)


def test_submodules_called_by_hand(ranks):
    ranks(2).run(_by_hand)


def _nested_in_forward():
    """A forward that differentiates by its input, as energy models do, between uses of other weights."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.energy, self.last = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.energy(leaf).pow(2).sum(), leaf)
            return self.last(x + force)

    twins = SideBySide(Energy)
    with late_collectives():
        for step in range(4):
            twins.step(inputs(step, 3, 16))
            x = inputs(step, 3, 16)[rank()]
            with torch.no_grad():
                assert torch.equal(twins.sharded(x), twins.plain(x))


def test_a_backward_inside_a_forward(ranks):
    ranks(2).run(_nested_in_forward)


def _loss_of_full_weights():
    """Any function of a weight, through its differentiable full tensor, adds to what GEMMs contribute."""

    def loss(model, x):
        first, last = model[0].weight, model[4].weight
        if isinstance(first, gtp.GTPWeight):
            first, last = first.full_tensor(), last.full_tensor()
        return square(model, x) + first.pow(2).sum() + F.cross_entropy(x @ last.t(), torch.zeros(3, dtype=torch.long))

    twins = SideBySide(_mlp, **ROUNDED)
    with late_collectives():
        for step in range(3):
            twins.step(inputs(step, 3, 16), loss)
    with torch.no_grad():
        assert not twins.sharded[0].weight.full_tensor().requires_grad


def test_losses_of_full_weights(ranks):
    ranks(2).run(_loss_of_full_weights)


def _tools():
    """Anomaly mode, activation offloading, module hooks, functional calls."""
    twins = SideBySide(_mlp)
    seen = []
    for model in (twins.plain, twins.sharded):
        for module in model:
            module.register_full_backward_hook(lambda m, gi, go: seen.append(type(m).__name__))

    def offloaded(model, x):
        with torch.autograd.graph.save_on_cpu():
            return square(model, x)

    def functional(model, x):
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).pow(2).mean()

    for step, loss in enumerate([square, offloaded, functional]):
        with torch.autograd.detect_anomaly(check_nan=True):
            twins.step(inputs(step, 3, 16), loss)
    assert seen.count("Linear") == 3 * 3 * 3  # layers, steps, and of each the two reference ranks and ours


def test_tools_around_autograd(ranks):
    ranks(2).run(_tools)


def _hooks_on_weights():
    weight = nn.Linear(16, 16)
    gtp.shard_model(weight, dist.group.WORLD)
    with pytest.raises(gtp.UnsupportedError, match="register_post_accumulate_grad_hook"):
        weight.weight.register_hook(lambda g: g)


def test_gradient_hooks_that_would_never_run_are_refused(ranks):
    ranks(2).run(_hooks_on_weights)

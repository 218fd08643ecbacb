"""torch.compile over sharded models: before sharding and after it, the numbers are those of eager and it settles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import maybe_enable_compiled_autograd

import gtp
from gtp.testing.ranks import rank
from tests.compiling import fresh_compiler
from tests.reference import assert_same_parameters, data_parallel_backward
from tests.weights.side_by_side import inputs, sgd, square


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x)))) * 0.5


def _compile(how, model, group):
    """The sharded, compiled model and what to call. `model` is plain."""
    if how == "blocks_then_shard":
        for block in model:
            block.compile(backend="aot_eager")
        gtp.shard_model(model, group)
        return model
    gtp.shard_model(model, group)
    if how == "shard_then_model_in_place":
        model.compile(backend="aot_eager")
        return model
    return torch.compile(model, backend="aot_eager")


HOW = ["blocks_then_shard", "shard_then_model", "shard_then_model_in_place"]


def _compiled_training(how):
    torch.manual_seed(7)
    plain = nn.Sequential(*[Block() for _ in range(2)])
    sharded = copy.deepcopy(plain)
    graphs = []
    with fresh_compiler():
        called = _compile(how, sharded, dist.group.WORLD)
        optimizers = [sgd(model.parameters()) for model in (plain, sharded)]
        for step in range(5):
            every = inputs(step, 3, 16)
            expected = data_parallel_backward(plain, every, square)[rank()]
            loss = square(called, every[rank()])
            loss.backward()
            assert torch.equal(loss.detach(), expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(sharded, plain)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        with torch.no_grad():
            for model in (plain, called):
                model.eval()
            assert torch.equal(called(every[0]), plain(every[0]))
    return graphs


@pytest.mark.parametrize("how", HOW)
def test_a_compiled_model_trains_bit_for_bit_and_compiles_once(ranks, how):
    """C96."""
    for graphs in ranks(2).run(_compiled_training, how):
        assert graphs[0] > 0
        assert graphs[1:] == [graphs[1]] * 4, "it recompiles after the second step"


def _compiled_steps():
    torch.manual_seed(7)
    plain = nn.Sequential(*[Block() for _ in range(2)])
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD)

    def step(x):
        loss = square(sharded, x)
        loss.backward()
        return loss.detach()

    with fresh_compiler():
        compiled = torch.compile(step, backend="aot_eager")
        optimizers = [sgd(model.parameters()) for model in (plain, sharded)]
        for number in range(3):
            every = inputs(number, 3, 16)
            expected = data_parallel_backward(plain, every, square)[rank()]
            assert torch.equal(compiled(every[rank()]), expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(sharded, plain)


def test_a_compiled_step_with_its_backward_trains_bit_for_bit(ranks):
    """Its backward is called inside of what is compiled, and gathers and reductions are not compiled with it."""
    ranks(2).run(_compiled_steps)


def _compiled_autograd(frozen):
    model = nn.Sequential(Block(), Block())
    gtp.shard_model(model, dist.group.WORLD)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "norm" in name)
    x = inputs(0, 3, 16)[rank()]
    with fresh_compiler(), maybe_enable_compiled_autograd(True, fullgraph=False):
        with pytest.raises(gtp.UnsupportedError) as caught:
            square(model, x).backward()
    model.zero_grad()
    square(model, x).backward()
    return str(caught.value)


@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "norms trained"])
def test_compiled_autograd_is_refused(ranks, frozen):
    """It calls no final callbacks, by which gtp knows that backward ends: there would be no gradients."""
    for text in ranks(2).run(_compiled_autograd, frozen):
        assert "torch._dynamo.config.compiled_autograd = False" in text


def _full_graph():
    model = nn.Sequential(Block(), Block())
    gtp.shard_model(model, dist.group.WORLD)
    x = inputs(0, 3, 16)[rank()]
    with fresh_compiler():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            compiled(x)
        text = str(caught.value)
    square(model, x).backward()  # usable as it was
    return text


def test_a_full_graph_over_a_sharded_weight_is_refused(ranks):
    """C96."""
    for text in ranks(2).run(_full_graph):
        assert "gtp gathers weights and reduces gradients outside of graphs: compile without fullgraph=True" in text

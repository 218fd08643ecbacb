"""Code of others that meets a sharded model: what it reads from parameters, copies, traces and optimizers of torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import gtp
from gtp.testing.ranks import rank, subgroup
from tests.reference import assert_same_parameters
from tests.weights.side_by_side import SideBySide, inputs
from tests.weights.unshard_kinds import Conv1D


class _Scaled(Conv1D):
    """Reads from its parameter what was written on it, as muP's layers do."""

    def __init__(self):
        super().__init__()
        self.weight.scale = 3.0

    def forward(self, x):
        return super().forward(x) * getattr(self.weight, "scale", 1.0)


def _attributes():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8), _Scaled())
    x = inputs(0, 4, 8)[rank()]
    with torch.no_grad():
        expected = model(x)
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    assert torch.equal(model(x).detach(), expected)
    model[1].weight.scale = 6.0
    with torch.no_grad():
        assert torch.equal(model(x), 2 * expected)


@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_finds_the_attributes_of_its_parameter_on_the_full_weight(ranks, size):
    """They were not there, and `getattr` with a default took the default without a word."""
    ranks(size).run(_attributes)


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.sparse = nn.Parameter(torch.randn(8, 8)), True

    def forward(self, ids):
        return F.embedding(ids, self.weight, sparse=self.sparse)


def _sparse():
    ids = torch.tensor([1, 2, 2])
    twins = SideBySide(lambda: nn.Sequential(_Table(), nn.Linear(8, 8)), unshard="*", optimizer=None)
    table = twins.sharded[0]
    for use in (lambda: twins.sharded(ids), lambda: F.embedding(ids, table.weight.full_tensor(), sparse=True)):
        y = use()
        with pytest.raises(gtp.UnsupportedError, match=r"0\.weight.*its gradient is sparse.*sparse=False"):
            y.sum().backward()
    twins.sharded.zero_grad()
    twins.plain[0].sparse = table.sparse = False
    twins.backward([ids, ids + 1])


def test_sparse_gradients_of_full_weights_are_refused_by_name(ranks):
    ranks(2).run(_sparse)


def _traced():
    model = nn.Sequential(nn.Linear(8, 8), Conv1D())
    gtp.shard_model(model, dist.group.WORLD, unshard="1.*")
    with pytest.raises(gtp.UnsupportedError, match=r"1\.weight.*torch\.fx\.symbolic_trace would record.*plain model"):
        torch.fx.symbolic_trace(model)
    assert model(torch.randn(4, 8)).shape == (4, 8)


def test_a_symbolic_trace_would_hold_the_weights_of_now_and_is_refused(ranks):
    """C65: of modules that are whole in their forward; Linears are taken as they are."""
    ranks(2).run(_traced)


def _copied():
    def build():
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), Conv1D())

    twins = SideBySide(build, unshard="2.*", optimizer=None)
    x = inputs(0, 4, 8)[rank()]
    copied = copy.copy(twins.sharded[0])
    copied._parameters = {"weight": twins.sharded[1].weight, "bias": None}
    for layer in (copied, copy.copy(copied)):
        assert torch.equal(layer(x), twins.plain[1](x))
    assert torch.equal(twins.sharded[0](x), twins.plain[0](x))
    with pytest.raises(gtp.UnsupportedError, match=r"2\.bias.*addmm needs the full weight"):
        copy.copy(twins.sharded[2])(x)
    twins.backward(inputs(1, 4, 8))


def test_a_shallow_copy_of_a_layer_computes_with_its_own_weight(ranks):
    """It ran the forward of the layer that it was copied from."""
    ranks(2).run(_copied)


def _own_forward_copied():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: 2 * F.linear(x, layer.weight)
    gtp.shard_model(layer, dist.group.WORLD)
    x = torch.ones(1, 8)
    assert torch.equal(copy.copy(layer)(x), layer(x))


def test_a_shallow_copy_keeps_a_forward_that_a_user_gave(ranks):
    ranks(2).run(_own_forward_copied)


def _divided():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(gtp.UnsupportedError, match=r"ZeroRedundancyOptimizer divides.*one rank's rows over the other"):
        ZeroRedundancyOptimizer(twins.sharded.parameters(), torch.optim.SGD, lr=0.1)
    assert_same_parameters(twins.sharded, twins.plain)
    twins.step(inputs(0, 4, 8))


def test_an_optimizer_that_broadcasts_parameters_is_refused(ranks):
    """C91: its first step wrote one rank's rows over the other ranks'."""
    ranks(2).run(_divided)


def _collectives():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    twins.backward(inputs(0, 4, 8))
    weight = twins.sharded[0].weight
    alone = [subgroup((r,)) for r in range(2)][rank()]
    for rows in (weight, weight.data, weight.grad):
        for name, over in (
            ("broadcast", lambda group, rows=rows: dist.broadcast(rows, rank(), group=group)),
            ("all_reduce", lambda group, rows=rows: dist.all_reduce(rows, group=group)),
            ("all_reduce_coalesced", lambda group, rows=rows: dist.all_reduce_coalesced([rows], group=group)),
        ):
            text = rf"'0\.weight'.*{name} over ranks that hold other rows.*\.shard"
            for group in (None, dist.group.WORLD):
                with pytest.raises(gtp.UnsupportedError, match=text):
                    over(group)
            with torch.no_grad():
                over(alone)  # of replicas, say
        dist.all_reduce(rows, group=dist.GroupMember.NON_GROUP_MEMBER)  # what ranks outside of a new group have
    twins.update()


def test_collectives_over_ranks_with_other_rows_are_refused(ranks):
    """C65: as in a loop that made ranks equal, or averaged gradients, by hand. Over others they are let through."""
    ranks(2).run(_collectives)

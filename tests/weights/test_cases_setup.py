"""Set-up: when the optimizer is made, whether the feature is in use at all, and what a mean over the data is."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtp
from gtp.testing.collectives import collective_log
from gtp.testing.ranks import rank, subgroup
from tests.reference import assert_same_parameters, data_parallel_backward
from tests.weights.side_by_side import inputs, square

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),  # state from the beginning
}


def _model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12))


def _trained(name, when):
    """Steps of the plain and the sharded model whose optimizer was made at this moment; equal bit for bit."""
    make = OPTIMIZERS[name]
    plain, sharded = _model(), _model()
    reference = make(plain.parameters())
    if when == "before":
        optimizer = make(sharded.parameters())
    gtp.shard_model(sharded, dist.group.WORLD)
    if when == "after_a_forward":
        sharded(inputs(50, 3, 16)[rank()]).sum().backward()
        sharded.zero_grad()
    if when != "before":
        optimizer = make(sharded.parameters())
    start = sharded[0].weight.full_tensor()
    for step in range(3):
        every = inputs(step, 3, 16)
        data_parallel_backward(plain, every, square)
        square(sharded, every[rank()]).backward()
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        assert_same_parameters(sharded, plain)
    assert not torch.equal(sharded[0].weight.full_tensor(), start)


@pytest.mark.parametrize("when", ["before", "after", "after_a_forward"])
def test_an_optimizer_made_at_any_moment_trains_the_weights(ranks, when):
    """C64."""
    for name in OPTIMIZERS:
        if not (name == "adagrad" and when == "before"):
            ranks(2).run(_trained, name, when)


def _state_of_the_full_shape():
    sharded = _model()
    optimizer = OPTIMIZERS["adagrad"](sharded.parameters())
    gtp.shard_model(sharded, dist.group.WORLD)
    before = sharded[0].weight.full_tensor()
    square(sharded, inputs(0, 3, 16)[rank()]).backward()
    with pytest.raises(
        gtp.GTPValueError, match=r"'0\.weight'.*logical shape: make the optimizer.*after gtp\.shard_mod"
    ):
        optimizer.step()
    assert torch.equal(sharded[0].weight.full_tensor(), before)


def test_an_optimizer_with_state_of_the_full_weight_is_told_at_its_first_step(ranks):
    """C64."""
    ranks(2).run(_state_of_the_full_shape)


def _in_use():
    """What was asked for is what happened: bytes, collectives, the report."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    total = sum(p.untyped_storage().nbytes() for p in model.parameters())
    runtime = gtp.shard_model(model, dist.group.WORLD)
    local = sum(p.untyped_storage().nbytes() for p in model.parameters())
    with collective_log() as log:
        square(model, inputs(0, 2, 32)[rank()]).backward()
    stats = runtime.stats()
    gathers = [r for r in log.started("all_gather_into_tensor") if r.shape == (32, 32)]
    # forward, and backward but for the first layer
    assert len(gathers) == stats.consumes == 4 + 3
    assert stats.bytes_gathered == len(gathers) * 32 * 32 * 4
    assert stats.bytes_reduced == 4 * 32 * 32 * 4
    assert len(log.started("all_to_all_single")) == 4
    assert stats.transport == "process_group"
    return local / total, runtime.report.summary()


def test_what_is_on_can_be_seen(ranks):
    """C90."""
    for share, summary in ranks(4).run(_in_use):
        assert share == (1024 / 4 + 32) / (1024 + 32)
        assert summary.startswith("4 of 8 parameters sharded, 4,224 elements in all")


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.layers = nn.Linear(4, 4), [nn.Linear(4, 4)]


def _lost():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("gtp")
    log.addHandler(handler)
    try:
        gtp.shard_model(Hidden(), dist.group.WORLD)
    finally:
        log.removeHandler(handler)
    return records


def test_parameters_that_torch_does_not_see_are_warned_about(ranks):
    """C90, C92."""
    for records in ranks(2).run(_lost):
        (text,) = [r for r in records if "plain attribute" in r]
        assert "layers[0].weight, layers[0].bias" in text
        assert "nn.ModuleList" in text


# --- evaluation


def _means():
    pairs = [subgroup((0, 1)), subgroup((2, 3))]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    loss = float(rank() + 1)
    assert gtp.data_size(dist.group.WORLD) == 4
    assert gtp.data_size(mesh) == 4
    assert gtp.data_size(mesh["gtp"]) == 2
    assert gtp.data_size(pairs[rank() // 2]) == 2
    assert gtp.data_size(subgroup((0, 1, 2, 3))) == 4
    everywhere = [gtp.data_mean(loss, dist.group.WORLD), gtp.data_mean(torch.tensor(loss), mesh)]
    assert all(torch.equal(mean, torch.tensor(2.5)) for mean in everywhere)
    assert gtp.data_mean(loss, pairs[rank() // 2]).item() == [1.5, 1.5, 3.5, 3.5][rank()]
    # any shape and dtype; wide enough for large counts; nothing changes in place, no graph is kept
    given = torch.full((2, 3), loss, dtype=torch.bfloat16, requires_grad=True)
    mean = gtp.data_mean(given, mesh)
    assert mean.dtype is torch.float32
    assert not mean.requires_grad
    assert torch.equal(mean, torch.full((2, 3), 2.5))
    assert torch.equal(given.detach(), torch.full((2, 3), loss, dtype=torch.bfloat16))
    assert gtp.data_mean(torch.tensor(loss, dtype=torch.float64), mesh).dtype is torch.float64
    assert gtp.data_mean(2**24 + 4 * rank(), mesh).item() == 2**24 + 6
    strided = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() * loss
    assert torch.equal(gtp.data_mean(strided, mesh), torch.tensor([[2.5, 7.5], [5.0, 10.0]]))
    with pytest.raises(gtp.GTPValueError, match="takes a ProcessGroup or a DeviceMesh, got NoneType"):
        gtp.data_mean(loss, None)
    # a sample counter grows by the batch of all ranks that see different data
    batch, seen = 3, 0
    for _ in range(2):
        seen += batch * gtp.data_size(mesh)
    return seen


def test_a_mean_over_the_data_takes_every_rank_that_sees_data(ranks):
    """C89."""
    assert ranks(4).run(_means) == [24] * 4


def _evaluated():
    """The mean loss of a sharded model over all ranks' batches is the plain model's over them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    plain, sharded = _model(), _model()
    gtp.shard_model(sharded, mesh)
    every = inputs(0, 3, 16)
    with torch.no_grad():
        got = gtp.data_mean(square(sharded, every[rank()]), mesh)
        wanted = torch.stack([square(plain, x) for x in every]).mean()
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)  # four fp32 numbers added in another order
    return got


def test_evaluation_losses_are_equal_on_all_ranks(ranks):
    """C89."""
    first, *others = ranks(4).run(_evaluated)
    assert all(torch.equal(first, other) for other in others)

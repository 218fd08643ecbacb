"""Layers graphed one by one with `gtp.make_graphed_callables`, on GPUs: training with them is training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gtp
from gtp.testing.ranks import rank, world_size
from tests.reference import assert_same_gradients, assert_same_parameters, data_parallel_backward
from tests.weights.test_gpu_training import device_and_group
from tests.weights.test_graphed import Block

pytestmark = pytest.mark.gpu

WIDTH = 1024  # a shard of the square weights in fp32 is one page of 2 MiB, so that own shards are mapped


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH, **options) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _inputs(step, device):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(16, WIDTH, generator=generator).to(device) for _ in range(world_size())]


def loss_of(model, x):
    return model(x).square().mean()


def _train(transport, micro_batches, options, config):
    device, group = device_and_group()
    torch.manual_seed(3)
    plain = Model(**options).to(device)
    sharded = copy.deepcopy(plain)
    runtime = gtp.shard_model(sharded, group, config=gtp.GTPConfig(transport=transport, **config))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, sharded)]
    x = _inputs(0, device)[rank()]
    loss_of(sharded, x).backward()
    sharded.zero_grad()
    # the first block's input needs no gradient
    samples = tuple((torch.randn_like(x).requires_grad_(position > 0),) for position in range(3))
    assert gtp.make_graphed_callables(tuple(sharded.blocks), samples) == tuple(sharded.blocks)
    for step in range(4):
        for micro in range(micro_batches):
            every = _inputs(10 * step + micro, device)
            data_parallel_backward(plain, every, loss_of)
            if step % 2 == rank() % 2:
                torch.cuda._sleep(int(1e7))  # each rank is late now and then
            loss_of(sharded, every[rank()]).backward()
        # fp32: cuBLAS may choose another kernel under capture
        assert_same_gradients(sharded, plain, rtol=1e-3, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(sharded, plain, rtol=1e-3, atol=1e-5)
    sharded.eval()  # which is not what was captured
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), plain(x), rtol=1e-3, atol=1e-4)
    assert runtime.stats().transport == transport
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "options", [{}, {"twice": True}, {"recomputed": True}], ids=["plain", "used twice", "recomputed"]
)
@pytest.mark.parametrize("transport", ["process_group", "copy_engine"])
def test_training_with_graphed_layers_is_training(ranks, transport, options):
    if transport == "process_group" and torch.cuda.device_count() < 2:
        pytest.skip("gloo, which two ranks on one GPU need, cannot be captured")
    ranks(2).run(_train, transport, 1, options, {})


def test_without_room_ahead_training_is_the_same(ranks):
    ranks(2).run(_train, "copy_engine", 1, {}, {"prefetch_bytes": 0})


def test_gradients_of_several_replays_add_up(ranks):
    ranks(2).run(_train, "copy_engine", 3, {}, {})

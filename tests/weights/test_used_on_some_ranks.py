"""Replicated parameters that some ranks use and others do not: what is missing counts as zero. C42."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtp
from gtp.testing.collectives import collective_log
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide, adamw, inputs
from tests.weights.test_gpu_training import TRANSPORTS, device_and_group


class Conditioned(nn.Module):
    """A sharded trunk, and parameters that only some inputs come to."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.tokens = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.BatchNorm1d(16, affine=True, track_running_stats=False)])
        self.spare = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(16).double())

    def forward(self, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
        x, way = batch
        x = self.trunk(x)
        if way < 2:
            x = self.norms[way](x) + self.tokens[1 - way]
        return x * self.scale.float() if way == 1 else x


def _batches(step: int) -> list[tuple[torch.Tensor, int]]:
    return [(x, (r + step) % 3) for r, x in enumerate(inputs(step, 5, 16))]


def _trains(config: gtp.GTPConfig) -> None:
    twins = SideBySide(Conditioned, optimizer=adamw, config=config, rtol=1e-5, atol=1e-6)
    for step in range(6):
        twins.backward(_batches(step))
        twins.backward(_batches(step + 1))  # added to the first
        assert twins.sharded.spare.grad is None
        twins.update()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("debug", [False, True])
def test_ranks_train_as_data_parallelism_does(ranks: Any, count: int, debug: bool) -> None:
    ranks(count).run(_trains, gtp.GTPConfig(debug=debug, debug_timeout=30.0))


def _one_rank_uses_one() -> None:
    twins = SideBySide(Conditioned, rtol=1e-6, atol=1e-7)
    seen: list[Any] = []
    token = twins.sharded.tokens[1]
    token.register_hook(lambda grad: seen.append(grad.clone()))
    token.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    (x, y) = inputs(0, 5, 16)
    twins.backward([(x, 0), (y, 2)])
    assert len(seen) == 2  # on the rank that did not use it, too
    assert torch.equal(seen[0], token.grad)
    assert seen[1] is token.grad
    assert twins.sharded.norms[1].weight.grad is None  # no rank did


def test_a_rank_without_a_gradient_gets_the_others_and_its_hooks_run(ranks: Any) -> None:
    ranks(2).run(_one_rank_uses_one)


def _held_on_one_rank() -> None:
    twins = SideBySide(Conditioned, rtol=1e-5, atol=1e-6)
    with twins.runtime.no_sync():
        twins.backward(_batches(0), check=False)
        twins.backward(_batches(1), check=False)
    twins.backward(_batches(2))


def test_what_no_sync_holds_on_some_ranks_is_reduced_on_all(ranks: Any) -> None:
    ranks(3).run(_held_on_one_rank)


class Shrinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return x if self.last is None else self.last(x)


def _deleted_on_one_rank() -> None:
    """When Python deletes what the model has no more is each rank's own affair."""
    twins = SideBySide(Shrinks, optimizer=None)
    twins.backward(inputs(0, 5, 16))
    parameter = twins.sharded.last.weight
    parameter.grad = None
    gone = weakref.ref(parameter)
    held = [parameter] if rank() == 0 else []
    del parameter
    for model in (twins.plain, twins.sharded):
        model.last = None
        model.zero_grad()
    for step in range(3):
        twins.backward(inputs(step, 5, 16))
        gc.collect()
        assert (gone() is None) is not bool(held)  # since the forward, at the latest
    assert all(parameter.grad is None for parameter in held)


def test_a_parameter_may_live_longer_on_one_rank(ranks: Any) -> None:
    ranks(2).run(_deleted_on_one_rank)


def _for_inputs_alone() -> list[list[str]]:
    """Gradients for inputs, and gradients that are returned, send no message of all parameters."""
    model = Conditioned()
    gtp.shard_model(model, dist.group.WORLD)
    x = inputs(0, 5, 16)[rank()].requires_grad_()
    logs = []
    for wanted in ([x], [model.trunk.bias], [model.trunk.weight]):
        loss = model((x, 0)).pow(2).mean()
        with collective_log() as log:
            torch.autograd.grad(loss, wanted)
        logs.append([line for line in log.lines() if "start all_reduce" in line])
    return logs


def test_a_backward_that_trains_nothing_sends_nothing(ranks: Any) -> None:
    for for_input, for_bias, for_weight in ranks(2).run(_for_inputs_alone):
        assert for_input == []
        assert len(for_bias) == 1
        assert for_weight == []


def _rows_use_different_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    torch.manual_seed(7)
    body = nn.Linear(16, 16)
    experts = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
    model = nn.ModuleDict({"body": body, "experts": experts})
    gtp.shard_model(model, {"experts.*": mesh["gtp"], "*": mesh})
    row = mesh.get_local_rank("replicate")
    x = inputs(0, 3, 16)[rank()]
    for _ in range(2):
        (body(x) + experts[row](x)).sum().backward()
    torch.testing.assert_close(body.bias.grad, torch.full((16,), 6.0))
    assert experts[row].weight.grad is not None
    assert experts[1 - row].weight.grad is None


def test_groups_that_share_an_axis_alone_may_reduce_different_weights(ranks: Any) -> None:
    ranks(4).run(_rows_use_different_experts)


def _messages() -> list[str]:
    model = Conditioned()
    gtp.shard_model(model, dist.group.WORLD)
    with collective_log() as log:
        for step in range(3):
            model(_batches(step)[rank()]).sum().backward()
    return log.lines()


def test_all_ranks_send_the_same_whatever_they_use(ranks: Any) -> None:
    first, second, third = ranks(3).run(_messages)
    assert first == second == third
    assert len(first) > 3 * 3


def _trains_on_gpus(transport: str) -> None:
    device, group = device_and_group()
    twins = SideBySide(
        lambda: Conditioned().to(device),
        optimizer=adamw,
        group=group,
        config=gtp.GTPConfig(transport=transport),
        rtol=1e-4,
        atol=1e-5,
    )
    for step in range(4):
        twins.backward([(x.to(device), way) for x, way in _batches(step)])
        twins.backward([(x.to(device), way) for x, way in _batches(step + 1)])
        assert twins.sharded.spare.grad is None
        twins.update()


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gpus_train_as_data_parallelism_does(ranks: Any, transport: str) -> None:
    ranks(2).run(_trains_on_gpus, transport)

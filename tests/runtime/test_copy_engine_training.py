"""Training on the copy engine on real streams: eager, with a compute copy, and in CUDA graphs. One GPU is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import RankPool, rank, world_size
from tests.reference import assert_same_parameters, data_parallel_backward, full
from tests.runtime.test_copy_engine import device_of_rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


class Model(nn.Module):
    """Without an embedding: its backward on CUDA adds in no fixed order.

    At width 64 own shards are copied into gathered weights; at 1024 those of the layers are whole pages, and mapped.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(50, width, bias=False)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
                for _ in "1234"
            ]
        )
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(nn.functional.one_hot(ids, 50).to(self.head.bias.dtype))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten().roll(1))


def batches(step: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 50, (2, 8), generator=generator).to(device) for _ in range(world_size())]


def same_parameters(first: nn.Module, second: nn.Module) -> list[bool]:
    return [torch.equal(full(a), full(b)) for a, b in zip(first.parameters(), second.parameters(), strict=True)]


def warmed_up(step: Callable[[], object]) -> None:
    """On a side stream, as CUDA graphs want it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()


WIDTHS = pytest.mark.parametrize("width", [64, 1024], ids=["copied", "mapped"])


def require_mapped(runtime: gtp.GTPRuntime, width: int) -> None:
    assert (runtime.transport.mapped_bytes > 0) == (width == 1024)


def train_both(width: int, keep_bytes: int) -> dict[str, Any]:
    device = device_of_rank()
    torch.manual_seed(0)
    plain, sharded = Model(width).to(device), Model(width).to(device)
    sharded.load_state_dict(plain.state_dict())
    config = gtp.GTPConfig(transport="copy_engine", keep_bytes=keep_bytes)
    runtime = gtp.shard_model(sharded, dist.group.WORLD, config=config)
    ours, theirs = torch.optim.AdamW(sharded.parameters(), 1e-2), torch.optim.AdamW(plain.parameters(), 1e-2)
    same_losses = []
    for step in range(6):
        mine = batches(step, device)
        loss = loss_of(sharded, mine[rank()])
        loss.backward()
        wanted = data_parallel_backward(plain, mine, loss_of)
        # Before the first update all weights are equal, and so is the forward, bit for bit. cuBLAS may take other
        # kernels for the wgrads (theirs are transposed), which round otherwise, and AdamW scales that up to its step.
        if step == 0:
            same_losses.append(torch.equal(loss.detach(), wanted[rank()]))
        torch.testing.assert_close(loss.detach(), wanted[rank()], rtol=1e-4, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(sharded, mine[rank()])  # a line without a backward
    assert_same_parameters(sharded, plain, rtol=1e-3, atol=2e-4)
    state = {k: v.clone().mul_(0.5) for k, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    sharded.load_state_dict(state)
    with torch.no_grad():
        same_losses.append(torch.equal(loss_of(sharded, mine[0]), loss_of(plain, mine[0])))
    require_mapped(runtime, width)
    stats = runtime.stats()
    return {"transport": (stats.transport, stats.transport_reason), "same": same_losses, "hits": stats.hit_rate > 0.5}


@WIDTHS
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_a_model_trains_as_the_unsharded_one(pair: RankPool, keep_bytes: int, width: int) -> None:
    wanted = {"transport": ("copy_engine", "asked for"), "same": [True] * 2, "hits": True}
    assert pair.run(train_both, width, keep_bytes * width // 64, timeout=100) == [wanted] * 2


def train_with_a_compute_copy(width: int) -> list[bool]:
    """fp32 weights, bf16 GEMMs: what is gathered is always the current weight, rounded."""
    device = device_of_rank()
    torch.manual_seed(0)
    model = Model(width).to(device)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.bfloat16()
    config = gtp.GTPConfig(transport="copy_engine", param_dtype=torch.bfloat16)
    runtime = gtp.shard_model(model, dist.group.WORLD, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    weight, same = model.layers[1][1].weight, []
    for step in range(4):
        loss_of(model, batches(step, device)[rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        (full,) = [weight.materialize_group_for_forward()]
        same.append(torch.equal(full, weight.full_tensor().bfloat16()))
        del full
    require_mapped(runtime, width)
    return same


@WIDTHS
def test_a_model_trains_with_a_compute_copy_in_peer_memory(pair: RankPool, width: int) -> None:
    assert pair.run(train_with_a_compute_copy, width, timeout=100) == [[True] * 4] * 2


def graphed_training(width: int) -> list[bool]:
    """Forward, backward and optimizer in one graph, against the same steps run eagerly."""
    device = device_of_rank()
    torch.manual_seed(0)
    models = [Model(width).to(device), Model(width).to(device)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        runtime = gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(transport="copy_engine"))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, capturable=True, foreach=True) for m in models]
    ids = batches(0, device)[rank()].clone()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    warmed_up(lambda: [step(*both) for both in zip(models, optimizers, strict=True)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_loss = step(models[1], optimizers[1])
    same = []
    for index in range(5):
        ids.copy_(batches(index + 1, device)[rank()])
        loss = step(models[0], optimizers[0])
        graph.replay()
        same.append(torch.equal(loss, captured_loss))
    same += same_parameters(*models)
    torch.cuda.synchronize()
    require_mapped(runtime, width)
    return same


@WIDTHS
def test_a_graphed_training_step_equals_the_eager_one(pair: RankPool, width: int) -> None:
    for same in pair.run(graphed_training, width, timeout=100):
        assert all(same), same


def graphs_captured_anew() -> tuple[list[bool], list[int]]:
    """Graphs of one step, each still right after the next was captured and after a release of pooled memory."""
    device = device_of_rank()
    torch.manual_seed(0)
    model = Model(1024).to(device)
    runtime = gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(transport="copy_engine"))
    ids = batches(0, device)[rank()].clone()

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, ids)
        loss.backward()
        return loss.detach()

    warmed_up(step)
    graphs, losses, held = [], [], []
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            losses.append(step())
        held.append(runtime.transport.mapped_bytes)
    eager = runtime.transport.mapped_bytes
    runtime.release()
    freed = eager - runtime.transport.mapped_bytes
    same = []
    for turn in range(3):
        ids.copy_(batches(turn + 1, device)[rank()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        wanted = step()
        for graph, loss in zip(graphs, losses, strict=True):
            graph.replay()
            same.append(torch.equal(loss, wanted))
    torch.cuda.synchronize()
    return same, [*held, freed]


def test_graphs_that_are_captured_anew_share_what_is_mapped(pair: RankPool) -> None:
    for same, (first, second, third, freed) in pair.run(graphs_captured_anew, timeout=100):
        assert all(same), same
        assert first == second == third > 0
        assert 0 < freed < first


def replayed_micro_batches() -> list[bool]:
    """Forward and backward of one micro-batch in a graph, replayed twice a step; the optimizer runs outside."""
    device = device_of_rank()
    torch.manual_seed(0)
    models = [nn.Sequential(*[nn.Linear(64, 64) for _ in "123"]).to(device) for _ in "12"]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(transport="copy_engine"))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    x = torch.empty(8, 64, device=device)

    def micro_batch(model: nn.Module) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def update(index: int) -> None:
        optimizers[index].step()
        optimizers[index].zero_grad(set_to_none=False)  # the graph adds to the gradients that it was captured with

    x.normal_(generator=torch.Generator(device).manual_seed(rank()))
    warmed_up(lambda: [micro_batch(model) for model in models])
    update(0)
    update(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_loss = micro_batch(models[1])
    generator, same = torch.Generator(device).manual_seed(10 + rank()), []
    for step in range(5):
        for _ in range(2):
            x.normal_(generator=generator)
            loss = micro_batch(models[0])
            if (step + rank()) % 2:
                torch.cuda._sleep(2_000_000)  # this rank publishes what the optimizer wrote about a millisecond late
            graph.replay()
            same.append(torch.equal(loss, captured_loss))
        update(0)
        update(1)
        same += same_parameters(*models)
    torch.cuda.synchronize()
    return same


def test_replays_read_the_weights_that_the_optimizer_wrote_between_them(pair: RankPool) -> None:
    """C94."""
    for same in pair.run(replayed_micro_batches, timeout=100):
        assert all(same), same

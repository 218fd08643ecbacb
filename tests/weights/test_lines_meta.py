"""Models built on the meta device: one seed gives one model at any number of ranks; the whole is never in memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank, subgroup
from tests.reference import full
from tests.weights.side_by_side import inputs, live_count, square
from tests.weights.test_lines_memory import StoragePeak


class Model(nn.Module):
    """Names in an order other than that of use; equal shapes; a tied head; a buffer; a norm."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(22, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 22, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def _init(name: str, tensor: torch.Tensor) -> None:
    """Values that say whose they are."""
    tensor.copy_((torch.arange(tensor.numel()) % 101 + len(name)).view(tensor.shape))


def _full_weights(path, size):
    """The first rank of each group has seed 11; where the model is real, the others' values are broadcast over."""
    groups = [subgroup(tuple(range(start, start + size))) for start in range(0, 4, size)]
    group = groups[rank() // size]
    if path == "wrapped":
        torch.manual_seed(11 + rank() % size)
        model = Model()
        gtp.shard_model(model, group)
    else:
        torch.manual_seed(11)
        with torch.device("meta"):
            model = Model()
        gtp.shard_model(model, group, init=_init if path == "init" else None)
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.table.weight
    values = {name: full(p).clone() for name, p in model.named_parameters()}
    values |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    square(model, torch.arange(6) + rank()).backward()
    assert all(p.grad is not None for p in model.parameters())
    return values


@pytest.mark.parametrize("path", ["wrapped", "reset_parameters", "init"])
def test_one_seed_gives_one_model_at_any_number_of_ranks(ranks, path):
    """C62."""
    models = [model for size in (1, 2, 4) for model in ranks(4).run(_full_weights, path, size)]
    for name, value in models[0].items():
        assert all(torch.equal(model[name], value) for model in models[1:]), name
    if path == "init":
        assert torch.equal(models[0]["blocks.1.1.weight"].flatten()[:3], torch.tensor([17.0, 18.0, 19.0]))
        assert torch.equal(models[0]["norm.running_mean"][:2], torch.tensor([17.0, 18.0]))
        return
    assert torch.equal(models[0]["norm.running_var"], torch.ones(12))
    # no two ranks' rows are equal, nor two layers' weights
    blocks = [models[0][f"blocks.{i}.1.weight"] for i in range(3)]
    pieces = [*torch.cat(blocks).chunk(12), *models[0]["table.weight"].chunk(4)]
    assert not any(a.shape == b.shape and torch.equal(a, b) for i, a in enumerate(pieces) for b in pieces[:i])


WIDTH, LAYERS = 64, 16


def _uniform(name: str, tensor: torch.Tensor) -> None:
    tensor.uniform_()


def _peak_of_a_build(init):
    with StoragePeak() as memory:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        gtp.shard_model(model, dist.group.WORLD, init=_uniform if init else None)
        peak = memory.peak
    assert live_count(WIDTH * WIDTH * 4, at_most=0) == 0
    return peak


@pytest.mark.parametrize("init", [False, True])
def test_the_full_model_is_never_in_memory(ranks, init):
    full_weight = WIDTH * WIDTH * 4
    for peak in ranks(4).run(_peak_of_a_build, init):
        # shards; the weight that is initialized; two before it, which gloo's threads may let go of a moment late;
        # little tensors by which ranks compare what they build
        assert peak <= LAYERS * full_weight / 4 + 3 * full_weight + 1024


def _nothing_to_initialize_with():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(gtp.GTPValueError, match=r"scale: on the meta device, and Bare has no reset_parameters.*init="):
        gtp.shard_model(model, dist.group.WORLD)
    with torch.device("meta"):
        model = Bare()
    gtp.shard_model(model, dist.group.WORLD, init=_init, device="cpu")
    assert torch.equal(full(model.scale), torch.arange(8.0) + len("scale"))
    y = model(inputs(0, 2, 8)[rank()])
    assert math.isfinite(y.sum().item())


def test_a_module_that_cannot_initialize_itself_is_named(ranks):
    ranks(2).run(_nothing_to_initialize_with)


def _half_meta():
    """A head on the meta device beside a real trunk, as when a pretrained trunk gets a new head."""
    torch.manual_seed(5)
    trunk = nn.Linear(8, 8)
    wanted = trunk.weight.detach().clone()
    with torch.device("meta"):
        head = nn.Linear(8, 6)
    model = nn.Sequential(trunk, head)
    gtp.shard_model(model, dist.group.WORLD)
    assert torch.equal(full(model[0].weight), wanted)
    drawn = full(model[1].weight)
    bound = 1 / math.sqrt(8)
    assert drawn.abs().max() <= bound
    assert drawn.std() > bound / 4
    square(model, inputs(0, 2, 8)[rank()]).backward()
    return drawn


def test_a_model_that_is_partly_on_the_meta_device(ranks):
    first, second = ranks(2).run(_half_meta)
    assert torch.equal(first, second)

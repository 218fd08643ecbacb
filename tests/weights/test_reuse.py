"""A weight may be used any number of times in a step, by any mix of ops, in any order: its gradient is their sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.testing.collectives import late_collectives
from tests.weights.side_by_side import ROUNDED, SideBySide, adamw, inputs


def _ids(step, count):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(48, (3, 4), generator=generator) for _ in range(count)]


def _next_token(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


class Tied(nn.Module):
    """Table and head share a weight; two blocks between them, on request twice in the module tree."""

    def __init__(self, ways: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight
        self.aux = nn.Linear(16, 48, bias=False) if ways == 3 else None
        if self.aux is not None:
            self.aux.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.head(self.blocks(x))
        return y if self.aux is None else y + self.aux(x) + F.linear(x, self.table.weight)


def _tied(ways):
    twins = SideBySide(lambda: Tied(ways), optimizer=adamw, **ROUNDED)
    plain, sharded = twins.plain, twins.sharded
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in plain.named_parameters()]
    with late_collectives():
        for step in range(4):
            twins.step(_ids(step, twins.size), _next_token)
    assert sharded.head.weight is sharded.table.weight
    assert sum(isinstance(p, gtp.GTPWeight) for p in sharded.parameters()) == 3
    assert list(sharded.state_dict()) == list(plain.state_dict())
    line = next(line for line in twins.runtime.report.lines if line.name == "table.weight")
    assert line.tied == ("head.weight", "aux.weight")[: ways - 1]


@pytest.mark.parametrize("size", [2, 4])
def test_tied_table_and_head_stay_one_weight_with_one_gradient(ranks, size):  # C11
    for ways in (2, 3):
        ranks(size).run(_tied, ways)


class Replayed(nn.Module):
    """`x -> A -> B -> B -> A -> B -> head`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.b, self.a, self.b, self.head):
            x = layer(x)
        return x


class LateReuse(nn.Module):
    """The head gives an early auxiliary output that the loss reads last, and the final one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.trunk2 = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        self.early = self.head(x)
        return self.head(self.trunk2(x))


class Recurrent(nn.Module):
    """One cell for as many steps as the sequence is long: another length at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.inp = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(xs.shape[1], 16)
        for x in xs:
            state = torch.tanh(self.cell(state) + self.inp(x))
        return state


def _with_early_output(model, x):
    late = model(x).pow(2).mean()
    return late + model.early.abs().mean()


def _square(model, x):
    return model(x).pow(2).mean()


MODELS = {
    "replayed": (Replayed, _square, lambda step: (3, 16)),  # C13
    "late_reuse": (LateReuse, _with_early_output, lambda step: (3, 16)),  # C15
    "recurrent": (Recurrent, _square, lambda step: (2 + step % 3, 3, 16)),
}


def _reused(name, config):
    build, loss, shape = MODELS[name]
    twins = SideBySide(build, config=config, **ROUNDED)
    with late_collectives():
        for step in range(6):
            twins.step(inputs(step, *shape(step)), loss)


@pytest.mark.parametrize("name", MODELS)
def test_layers_applied_again_and_again(ranks, name):
    for config in (gtp.GTPConfig(), gtp.GTPConfig(prefetch_bytes=1 << 20, keep_bytes=1 << 20)):
        ranks(2).run(_reused, name, config)

"""The model of these tests: every kind of entry that a state dict can have, and rows that nothing divides."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp

# 10, 1, 70 and 7 rows: with alignment 16 over four ranks some shards are all padding; one row of padding has the shape
# of the whole gate
ALIGNED = gtp.GTPConfig(alignment=16)


class Counter(nn.Module):
    """No sharded weight; a buffer, a buffer that is not saved, and extra state that is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen: dict[str, Any] = {"batches": 0, "name": "fresh"}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Net(nn.Module):
    def __init__(self, *, rows: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 8)
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Linear(8, 1, bias=False)
        self.up = nn.Linear(8, 70)
        self.down = nn.Linear(70, 7)
        self.counter = Counter()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        return self.down(F.gelu(self.up(x * self.gate(x).sigmoid())))


SHARDED = ("embedding.weight", "gate.weight", "up.weight", "down.weight")


def numbered(model: nn.Module, start: int = 0) -> nn.Module:
    """Fills each parameter and buffer with its global element index, plus `start`, so that a wrong row shows."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.arange(start, start + tensor.numel()).view(tensor.shape))
    return model


def pair(
    group: Any = None, config: gtp.GTPConfig | None = None, seed: int = 0, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """The plain model and the same one sharded over `group` (default: all ranks)."""
    torch.manual_seed(seed)
    plain = Net(**options)
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD if group is None else group, config=config or gtp.GTPConfig())
    return plain, sharded


def assert_same_state(sharded: nn.Module, plain: nn.Module) -> None:
    """Everything in both state dicts is equal, bit for bit; padding is zero."""
    full, expected = gtp.full_state_dict(sharded), plain.state_dict()
    assert list(full) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert full[key].dtype == value.dtype, key
            assert torch.equal(full[key], value), key
        else:
            assert full[key] == value, key
    for name, weight in sharded.named_parameters():
        if isinstance(weight, gtp.GTPWeight):
            assert not weight.plain_shard()[weight.layout.valid_rows :].any(), f"{name}: padding"


def train(model: nn.Module, optimizers: Any, steps: range, rank: int) -> list[float]:
    """Steps on data that depend on step and rank; the losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(7, (4, 3), generator=generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def local(value: torch.Tensor) -> torch.Tensor:
    """A parameter, a gradient or optimizer state as the plain tensor that this rank holds."""
    return value.detach().as_subclass(torch.Tensor)

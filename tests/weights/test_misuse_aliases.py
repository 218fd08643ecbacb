"""Looking at a shard is each rank's own business; writing it is ordered, through whatever it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank
from tests.weights.side_by_side import linears

_LOOKS = {
    "shard": lambda w: w.shard.abs().max(),
    "data": lambda w: w.data.abs(),
    "detach": lambda w: w.detach().clone(),
    "copied from": lambda w: torch.zeros(w.shape).copy_(w.data),
    "added from": lambda w: w.grad.clone().add_(w.data),
    "added from in a list": lambda w: torch._foreach_add_([torch.zeros(w.shape)], [w.detach()]),
}


def _one_rank_looks(look: str) -> None:
    torch.manual_seed(3)
    model = linears(3)
    gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(debug=True, debug_timeout=20.0))
    weight, x = model[1].weight, torch.ones(2, 16)
    model(x).sum().backward()
    wanted = weight.grad.clone()
    model.zero_grad(set_to_none=False)
    loss = model(x).sum()
    if rank() == 0:
        _LOOKS[look](weight)
    loss.backward()
    assert torch.equal(weight.grad.shard, wanted.shard)


@pytest.mark.parametrize("look", _LOOKS)
def test_one_rank_looks_at_a_shard_between_forward_and_backward(ranks: Any, look: str) -> None:
    ranks(2).run(_one_rank_looks, look)


_ALIASES = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "data of data": lambda w: w.data.data,
    "view of data": lambda w: w.data.view(w.shape),
    "view": lambda w: w.view_as(w),
    "contiguous": lambda w: w.detach().to(w.dtype).contiguous(),
}


class _Writes(nn.Sequential):
    """Between its layers, when the weights of later ones are prefetched, a function is called."""

    write = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            if index == 1 and self.write is not None:
                self.write()
            x = layer(x)
        return x


def _old_alias(alias: str) -> None:
    torch.manual_seed(3)
    model = _Writes(*linears(4, 16))
    runtime = gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(prefetch_bytes=1 << 20))
    x = torch.ones(2, 16)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        kept = _ALIASES[alias](model[2].weight)
    calls: list[str] = []
    transport = runtime.transport

    def noting(name: str) -> None:
        real = getattr(transport, name)
        setattr(transport, name, lambda *a: (calls.append(name), real(*a))[1])

    for name in ("open", "close", "start_gather", "finish_gather"):
        noting(name)

    def write() -> None:
        assert calls.count("start_gather") == 4
        with torch.no_grad():
            kept.mul_(0.5)
        calls.append("written")

    before = model[2].weight.full_tensor()
    model.write = write
    got = model(x)
    at = calls.index("written")
    assert calls[at - 1] == "close"
    assert calls[:at].count("finish_gather") == 4
    wanted = x
    for index in range(4):
        wanted = wanted @ model[index].weight.full_tensor().detach().t()
    torch.testing.assert_close(got, wanted)
    assert torch.equal(model[2].weight.full_tensor(), before / 2)


@pytest.mark.parametrize("alias", _ALIASES)
def test_a_write_through_an_old_alias_waits_for_gathers(ranks: Any, alias: str) -> None:
    ranks(2).run(_old_alias, alias)


def _padding() -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False))
    gtp.shard_model(model, dist.group.WORLD)
    weight = model[0].weight
    weight.data.fill_(3.0)
    assert weight.shard.sum().item() == 12.0 * weight.layout.valid_rows
    weight.grad = torch.ones(weight.shape)
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step()
    assert weight.shard.sum().item() == 8.0 * weight.layout.valid_rows


def test_padding_stays_zero_when_data_is_written(ranks: Any) -> None:
    ranks(2).run(_padding)


def _rank_local_answers() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    gtp.shard_model(model, dist.group.WORLD)
    weight = model[0].weight
    weight.grad = torch.ones(weight.shape)
    before = weight.full_tensor().detach()
    with torch.no_grad():
        for rows in (weight, weight.data, weight.grad):
            for function in (lambda r: torch.where(r != 0), torch.rand_like, torch.randn_like):
                with pytest.raises(gtp.UnsupportedError, match=r"'0\.weight'"):
                    function(rows)
            halves = torch.where(rows != 0, rows, 0.0) / 2
            assert torch.equal(halves.shard * 2, rows.shard)
    assert torch.equal(weight.full_tensor(), before)


def test_indices_of_elements_and_random_values_are_refused(ranks: Any) -> None:
    """`torch.where(rows != 0)` would be this rank's indices; `randn_like` the same rows on every rank."""
    ranks(2).run(_rank_local_answers)


def _set():
    layer = nn.Linear(8, 8, bias=False)
    gtp.shard_model(layer, dist.group.WORLD)
    weight, x = layer.weight, torch.ones(1, 8)
    layer(x)
    with torch.no_grad():
        if dist.get_world_size() > 1:
            with pytest.raises(
                gtp.GTPValueError, match=r"weight: \.data of a sharded weight must keep shape.*\(4, 8\)"
            ):
                weight.set_(torch.ones(8, 8))
            with pytest.raises(gtp.UnsupportedError, match=r"set_ would give it other memory.*copy_"):
                weight.data.set_(torch.ones(4, 8))
        with pytest.raises(gtp.UnsupportedError, match=r"set_ with a storage"):
            weight.set_(torch.ones(8, 8).untyped_storage())
        assert weight.set_(torch.ones(weight.layout.shard_shape)) is weight
    with pytest.raises(gtp.GTPValueError, match=r"weight: \.grad of a sharded weight is this rank's rows.*shard_slice"):
        weight.grad = torch.ones(16, 8)
    assert torch.equal(layer(x), torch.full((1, 8), 8.0))


@pytest.mark.parametrize("size", [1, 2])
def test_set_is_as_data_is(ranks, size):
    """C09: torch tells no subclass of it, and the next forward gathered the memory of before."""
    ranks(size).run(_set)

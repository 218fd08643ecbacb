"""Ordinary state dicts out of a sharded model and into it, one weight at a time.

Run one: `pytest tests/checkpoint/test_full.py -k broadcast`.
"""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtp
from gtp.errors import GTPValueError, UnsupportedError
from gtp.testing.ranks import rank, subgroup
from tests.checkpoint.models import ALIGNED, SHARDED, Net, assert_same_state, numbered, pair
from tests.weights.side_by_side import live_count


def _full():
    plain, sharded = pair(config=ALIGNED)
    full = gtp.full_state_dict(sharded)
    assert_same_state(sharded, plain)
    assert full._metadata == plain.state_dict()._metadata
    # an ordinary dict: it can be written and read by anybody, and later steps do not change it
    buffer = io.BytesIO()
    torch.save(full, buffer)
    buffer.seek(0)
    Net().load_state_dict(torch.load(buffer))
    with torch.no_grad():
        sharded.norm.bias.add_(1)
    assert torch.equal(full["norm.bias"], plain.norm.bias)
    only = gtp.full_state_dict(sharded, rank0_only=True, cpu_offload=True)
    if rank() == 0:
        assert list(only) == list(full)
        assert torch.equal(only["up.weight"], plain.up.weight)
    else:
        assert not only


def test_the_full_state_dict_is_the_plain_models(ranks):
    ranks(2).run(_full)


# -- from rank 0 -------------------------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """Sizes that no group divides; full weights large enough to be told from anything else in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Linear(70_001, 1, bias=False)
        self.wide = nn.Linear(24_001, 10)
        self.norm = nn.LayerNorm(17)
        self.register_buffer("scale", torch.arange(3))


# bytes of one rank's shard of `row` at four ranks, padding included (of `wide` it is a little more); of all of `wide`
SHARD, FULL = 4 * 70_001, 4 * 10 * 24_001


def _broadcast(config, at_most):
    torch.manual_seed(0)
    source = Uneven().state_dict() if rank() == 0 else None
    model = Uneven()
    gtp.shard_model(model, dist.group.WORLD, config=config)
    scatter, seen = dist.scatter, []

    def counted(*args, **kwargs):
        scatter(*args, **kwargs)
        seen.append([live_count(SHARD, at_most[0]), live_count(FULL, at_most[1])])

    dist.scatter = counted
    try:
        result = gtp.load_full_state_dict(model, source, broadcast_from_rank0=True)
    finally:
        dist.scatter = scatter
    assert result == ([], [])
    torch.manual_seed(0)
    assert_same_state(model, Uneven())
    return seen


def test_a_broadcast_load_never_puts_a_full_weight_on_another_rank(ranks):  # C33
    # the others: this rank's shard of each of the two weights, and the one that has just arrived
    any_number = (sys.maxsize, sys.maxsize)
    of_rank = [(any_number,), *[((3, 0),)] * 3]
    first, *others = ranks(4).run(_broadcast, gtp.GTPConfig(), per_rank_args=of_rank)
    assert max(full for _, full in first) > 0
    for seen in others:
        assert seen == [[3, 0], [3, 0]]
    ranks(4).run(_broadcast, ALIGNED, any_number)


def _on_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    _, sharded = pair(mesh, ALIGNED)
    wanted = numbered(Net(), 3)
    wanted.counter.seen = {"batches": 5, "name": "sent"}
    gtp.load_full_state_dict(sharded, wanted.state_dict() if rank() == 0 else None, broadcast_from_rank0=True)
    assert_same_state(sharded, wanted)
    only = gtp.full_state_dict(sharded, rank0_only=True)
    assert bool(only) == (rank() == 0)


def test_a_broadcast_load_reaches_replicas_and_extra_state(ranks):
    ranks(4).run(_on_mesh)


def _in_subgroup():
    group = subgroup((1, 3))
    if group is None:
        return
    _, sharded = pair(group)
    wanted = numbered(Net(), 3)
    gtp.load_full_state_dict(sharded, wanted.state_dict() if rank() == 1 else None, broadcast_from_rank0=True)
    assert_same_state(sharded, wanted)
    assert bool(gtp.full_state_dict(sharded, rank0_only=True)) == (rank() == 1)


def test_rank_0_is_the_first_rank_of_the_model(ranks):
    ranks(4).run(_in_subgroup)


def _names_and_shapes():
    plain, sharded = pair()
    sent = numbered(Net()).state_dict()
    for broadcast in (True, False):
        error = GTPValueError if broadcast else RuntimeError
        give = sent if rank() == 0 or not broadcast else None

        def without(key, give=give):
            return None if give is None else {k: v for k, v in give.items() if k != key}

        def having(key, value, give=give):
            return None if give is None else {**give, key: value}

        with pytest.raises(error, match=r"(?i)missing key.*up\.weight"):
            gtp.load_full_state_dict(sharded, without("up.weight"), broadcast_from_rank0=broadcast)
        with pytest.raises(error, match=r"(?i)unexpected key.*other\.weight"):
            gtp.load_full_state_dict(sharded, having("other.weight", torch.zeros(1)), broadcast_from_rank0=broadcast)
        with pytest.raises(GTPValueError, match=r"down\.weight: the state dict holds shape \(6, 70\)"):
            gtp.load_full_state_dict(sharded, having("down.weight", torch.zeros(6, 70)), broadcast_from_rank0=broadcast)
    # a missing or unexpected name is found by torch after it loaded the others; the broadcast load finds it before
    sharded.load_state_dict(plain.state_dict())
    give = {"up.weight": sent["up.weight"], "other": torch.zeros(1)} if rank() == 0 else None
    result = gtp.load_full_state_dict(sharded, give, broadcast_from_rank0=True, strict=False)
    assert result.unexpected_keys == ["other"]
    assert result.missing_keys == [k for k in plain.state_dict() if k != "up.weight"]
    assert torch.equal(sharded.up.weight.full_tensor(), sent["up.weight"])
    assert torch.equal(sharded.down.weight.full_tensor(), plain.down.weight)
    with pytest.raises(GTPValueError, match="state_dict is None"):
        gtp.load_full_state_dict(sharded, None)
    with pytest.raises(GTPValueError, match="first rank was given None"):
        gtp.load_full_state_dict(sharded, None, broadcast_from_rank0=True)
    with pytest.raises(GTPValueError, match=r"embedding\.weight: the state dict holds a ShardTensor"):
        gtp.load_full_state_dict(sharded, sharded.state_dict(), broadcast_from_rank0=True)
    give = {**sent, "up.weight": sent["up.weight"].numpy()} if rank() == 0 else None
    with pytest.raises(GTPValueError, match=r"up\.weight: the state dict holds a ndarray, no tensor"):
        gtp.load_full_state_dict(sharded, give, broadcast_from_rank0=True)
    # the first rank failed alone at these, and the others waited for their rows
    for key, value, kind in (("up.weight", sent["up.weight"].to("meta"), "on the meta device"),
                             ("up.bias", sent["up.bias"].to_sparse(), "sparse or nested")):  # fmt: skip
        give = {**sent, key: value} if rank() == 0 else None
        with pytest.raises(GTPValueError, match=rf"{key}: the state dict holds a tensor that is {kind}"):
            gtp.load_full_state_dict(sharded, give, broadcast_from_rank0=True)
    give = {**sent, "counter._extra_state": {"key": lambda: 1}} if rank() == 0 else None
    with pytest.raises(GTPValueError, match=r"counter\._extra_state: the state dict holds a dict that cannot be sent"):
        gtp.load_full_state_dict(sharded, give, broadcast_from_rank0=True)
    with pytest.raises(GTPValueError, match="no parameter of the model is sharded"):
        gtp.load_full_state_dict(Net(), sent, broadcast_from_rank0=True)


def test_what_does_not_fit_is_refused_on_every_rank(ranks):  # C33
    ranks(2).run(_names_and_shapes)


def _different_ranks():
    model = Net()
    halves = [subgroup((0, 1)), subgroup((2, 3))]
    gtp.shard_model(model, {"up.*": halves[rank() // 2], "*": dist.group.WORLD})
    with pytest.raises(UnsupportedError, match="live on different sets of ranks"):
        gtp.load_full_state_dict(model, Net().state_dict(), broadcast_from_rank0=True)
    wanted = numbered(Net())
    gtp.load_full_state_dict(model, wanted.state_dict())
    assert_same_state(model, wanted)


def test_a_model_on_several_sets_of_ranks_is_loaded_on_each_rank(ranks):
    ranks(4).run(_different_ranks)


# -- the full weights in place -----------------------------------------------------------------------------------------


def _full_weights():
    plain, sharded = pair(config=ALIGNED)
    with gtp.full_weights(sharded) as weights:
        assert list(weights) == list(SHARDED)
        assert all(torch.equal(w, plain.get_parameter(n)) for n, w in weights.items())
    low_rank = torch.arange(70.0)[:, None] @ torch.arange(8.0)[None]
    for model in (plain.state_dict(), sharded):
        context = gtp.full_weights(model, write=True) if model is sharded else contextlib.nullcontext(model)
        with context as weights:
            weights["gate.weight"] += 1
            weights["up.weight"].add_(low_rank, alpha=0.5)
    assert_same_state(sharded, plain)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(sharded(ids), plain(ids))
    message = r"gate\.weight: changed inside a read-only full_weights context.*write=True"
    with pytest.raises(GTPValueError, match=message), gtp.full_weights(sharded) as weights:
        weights["gate.weight"].zero_()
    assert_same_state(sharded, plain)


def test_full_weights_can_be_read_and_changed(ranks):  # C67
    ranks(2).run(_full_weights)


def _on_the_first_rank_only(path):
    _, sharded = pair(config=gtp.GTPConfig(debug=True, debug_timeout=2.0))
    if rank() == 0:
        with pytest.raises(gtp.DesyncError, match=r"gather a state dict of embedding\.weight, .*rank 1 did not come"):
            gtp.full_state_dict(sharded)
        with pytest.raises(gtp.DesyncError, match=r"save a checkpoint of embedding\.weight, .*rank 1 did not come"):
            gtp.checkpoint.save(path, sharded)


def test_a_checkpoint_that_one_rank_takes_alone_is_named_by_the_check(ranks, tmp_path):
    """`if rank == 0: save(...)`, as with data parallelism, waits for ever: the check says for whom."""
    ranks(2).run(_on_the_first_rank_only, str(tmp_path / "file"))

"""Plain state dicts of a sharded model: what `state_dict` shows, what `load_state_dict` takes, and what is refused.

Run one: `pytest tests/checkpoint/test_state_dict.py -k partial`.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.checkpoint import ShardTensor
from gtp.errors import GTPValueError, UnsupportedError
from gtp.testing.ranks import rank, subgroup
from gtp.weights.layout import ShardLayout
from gtp.weights.shard_tensor import ShardOrigin
from tests.checkpoint.models import ALIGNED, SHARDED, Net, assert_same_state, numbered, pair, train


def shards_of(model):
    return {n: p.plain_shard().clone() for n, p in model.named_parameters() if isinstance(p, gtp.GTPWeight)}


# -- ShardTensor, without ranks ----------------------------------------------------------------------------------------


def shard_tensor(rows: int = 10, rank: int = 1) -> ShardTensor:
    layout = ShardLayout((rows, 3), 4, rank, 2)
    shard = torch.arange(layout.shard_numel, dtype=torch.float32).view(layout.shard_shape)
    return ShardTensor(shard, ShardOrigin("up.weight", layout, None))  # type: ignore[arg-type]


def test_a_shard_tensor_shows_the_logical_shape_and_keeps_its_rows_when_copied():
    value = shard_tensor()
    assert value.shape == (10, 3)
    assert value.numel() == 30
    assert value.shard.shape == (4, 3)
    for other in (value.clone(), value.detach(), copy.deepcopy(value), value.to("cpu"), value.double().float()):
        assert type(other) is ShardTensor
        assert torch.equal(other.shard, value.shard)
        assert other.origin is value.origin
    assert value.double().shard.dtype == torch.float64
    assert value.clone().shard.data_ptr() != value.shard.data_ptr()
    assert value.detach().shard.data_ptr() == value.shard.data_ptr()
    assert repr(value) == "ShardTensor('up.weight', rows 4:8 of (10, 3), rank 1 of 4, torch.float32, cpu)"


def test_a_shard_tensor_is_copied_from_the_same_rows_only():
    value = shard_tensor()
    target = torch.zeros_like(value)
    target.copy_(value)
    assert torch.equal(target.shard, value.shard)
    for source in (torch.ones(10, 3), shard_tensor(rank=2)):
        with pytest.raises(UnsupportedError, match=r"up\.weight: aten::copy_"):
            target.copy_(source)
    with pytest.raises(UnsupportedError, match=r"value\.full_tensor\(\)"):
        torch.zeros(10, 3).copy_(value)


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v[0],
        lambda v: v.mul_(2),
        lambda v: torch.equal(v, v),
        lambda v: v.sum(),
        lambda v: v.view(-1),
        lambda v: torch.nn.functional.linear(torch.ones(1, 3), v),
    ],
)
def test_what_needs_other_rows_is_refused_by_name(use):
    with pytest.raises(UnsupportedError, match=r"up\.weight: aten::"):
        use(shard_tensor())


@pytest.mark.parametrize("ask", ["numpy", "tolist", "untyped_storage", "storage"])
def test_what_reads_memory_is_refused_by_name(ask):
    """Such as safetensors, behind Hugging Face's save_pretrained: it ended in an error about a pointer."""
    with pytest.raises(gtp.GTPError, match=r"up\.weight: .*full_state_dict") as caught:
        getattr(shard_tensor(), ask)()
    # of storage, safetensors takes it for a tensor on the meta device, and leaves the weight out of the file
    assert isinstance(caught.value, NotImplementedError) == (ask in ("numpy", "tolist"))


def test_torch_save_of_a_shard_says_what_to_do():
    with pytest.raises(UnsupportedError, match=r"rows 4:8 of \(10, 3\).*gtp\.checkpoint\.save.*full_state_dict"):
        torch.save({"w": shard_tensor()}, io.BytesIO())


def test_a_shard_of_another_shape_is_no_shard_tensor():
    with pytest.raises(GTPValueError, match=r"up\.weight: a ShardTensor takes the shard \(4, 3\).*got \(3, 3\)"):
        ShardTensor(torch.zeros(3, 3), shard_tensor().origin)


# -- state_dict --------------------------------------------------------------------------------------------------------


def _shown():
    plain, sharded = pair(config=ALIGNED)
    expected, shown = plain.state_dict(), sharded.state_dict()
    described = [(k, tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else (k, v) for k, v in shown.items()]
    assert described == [
        (k, tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else (k, v) for k, v in expected.items()
    ]
    assert shown._metadata == expected._metadata
    assert {k for k, v in shown.items() if isinstance(v, ShardTensor)} == set(SHARDED)
    # as in torch: values share the parameters' memory, and keep_vars gives the parameters themselves
    assert all(shown[n].shard.data_ptr() == sharded.get_parameter(n).data_ptr() for n in SHARDED)
    assert all(sharded.state_dict(keep_vars=True)[n] is sharded.get_parameter(n) for n in SHARDED)
    assert sum(v.numel() for v in shown.values() if isinstance(v, torch.Tensor)) == sum(
        v.numel() for v in expected.values() if isinstance(v, torch.Tensor)
    )
    assert list(sharded.up.state_dict(prefix="x.")) == ["x.weight", "x.bias"]
    with pytest.raises(UnsupportedError, match=r"embedding\.weight: this is rows"):
        torch.save(shown, io.BytesIO())
    for name in SHARDED:
        assert torch.equal(shown[name].full_tensor(), expected[name])


def test_the_state_dict_shows_keys_order_shapes_and_dtypes_of_the_plain_model(ranks):  # C34
    ranks(2).run(_shown)


def _one_rank():
    alone = [subgroup((r,)) for r in range(2)][rank()]
    plain, sharded = pair(alone)
    buffer = io.BytesIO()
    torch.save(sharded.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert all(torch.equal(loaded[n], plain.state_dict()[n]) for n in SHARDED)


def test_at_group_size_one_a_state_dict_is_an_ordinary_one(ranks):
    ranks(2).run(_one_rank)


# -- load_state_dict ---------------------------------------------------------------------------------------------------


def _load_kinds():
    plain, sharded = pair(config=ALIGNED)
    wanted = numbered(Net(), start=1000)
    sharded.load_state_dict(wanted.state_dict())
    assert_same_state(sharded, wanted)
    kept = copy.deepcopy(sharded.state_dict())
    shards = {n: sharded.get_parameter(n).detach().clone() for n in SHARDED}
    weights = sharded.state_dict(keep_vars=True)
    for state_dict in (kept, {**kept, **shards}, {k: v.clone() for k, v in kept.items() if k in SHARDED}):
        sharded.load_state_dict(plain.state_dict())
        assert_same_state(sharded, plain)
        sharded.load_state_dict(state_dict, strict=len(state_dict) == len(kept))
        assert all(torch.equal(sharded.get_parameter(n).full_tensor(), wanted.state_dict()[n]) for n in SHARDED)
    sharded.load_state_dict(weights)
    # a submodule by itself, and in another dtype
    sharded.up.load_state_dict({k: v.double() for k, v in plain.up.state_dict().items()})
    assert torch.equal(sharded.up.weight.full_tensor(), plain.up.weight)


def test_full_tensors_shard_tensors_weights_and_rows_all_load(ranks):
    ranks(2).run(_load_kinds)


def _partial():
    plain, sharded = pair()
    before = gtp.full_state_dict(sharded)
    other = numbered(Net()).state_dict()
    some = {k: other[k] for k in ("up.weight", "norm.bias")}
    result = sharded.load_state_dict(some, strict=False)
    assert result.missing_keys == [k for k in before if k not in some]
    after = gtp.full_state_dict(sharded)
    changed = [k for k, v in after.items() if isinstance(v, torch.Tensor) and not torch.equal(v, before[k])]
    assert sorted(changed) == ["norm.bias", "up.weight"]
    assert all(torch.equal(after[k], some[k]) for k in some)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "up\.adapter"'):
        sharded.load_state_dict({**plain.state_dict(), "up.adapter": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm\.weight"'):
        sharded.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "norm.weight"})


def test_partial_and_strict_loads_behave_as_in_torch(ranks):  # C34
    ranks(2).run(_partial)


def _refused():
    plain, sharded = pair(config=ALIGNED)
    before, other = shards_of(sharded), numbered(Net()).state_dict()
    elsewhere = ShardLayout((7, 70), 2, 1 - rank(), 16)
    moved = ShardTensor(torch.zeros(elsewhere.shard_shape), ShardOrigin("down.weight", elsewhere, dist.group.WORLD))
    refusals = [
        ({**other, "down.weight": torch.zeros(6, 70)}, {}, GTPValueError, r"down\.weight: .* shape \(6, 70\)"),
        # a vocabulary, or a head, of half the size
        ({"up.weight": torch.zeros(48, 8)}, {"strict": False}, GTPValueError, r"up\.weight: .* has \(70, 8\)\. It has"),
        ({**other, "down.weight": moved}, {}, GTPValueError, rf"down\.weight: .* rank {1 - rank()}'s rows of 2"),
        (other, {"assign": True}, UnsupportedError, r"assign=True"),
    ]
    for state_dict, options, error, message in refusals:
        with pytest.raises(error, match=message):
            sharded.load_state_dict(state_dict, **options)
        assert all(torch.equal(shard, before[n]) for n, shard in shards_of(sharded).items())
        assert torch.equal(sharded.norm.bias, plain.norm.bias)
    with pytest.raises(RuntimeError, match="While copying the parameter named"):
        Net().load_state_dict(sharded.state_dict())


def test_what_does_not_fit_is_refused_before_anything_changes(ranks):
    ranks(2).run(_refused)


class _Padded(nn.Embedding):
    """Files have 6 rows, the model 8: a hook pads what is loaded."""

    def __init__(self):
        super().__init__(8, 4)
        self._register_load_state_dict_pre_hook(self._pad)

    def _pad(self, state_dict, prefix, *_):
        value = state_dict[prefix + "weight"]
        if len(value) == 6:
            state_dict[prefix + "weight"] = torch.cat([value, torch.zeros(2, 4)])


class _Turned(nn.Linear):
    """Older files have its weight the other way round."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if state_dict[prefix + "weight"].shape == (self.in_features, self.out_features):
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _rewritten():
    def build():
        return nn.Sequential(_Padded(), nn.Sequential(_Turned(4, 6)))

    plain, sharded = build(), build()
    gtp.shard_model(sharded, dist.group.WORLD)
    sent = {"0.weight": torch.randn(6, 4), "1.0.weight": torch.randn(4, 6), "1.0.bias": torch.randn(6)}
    for value in sent.values():
        dist.broadcast(value, 0)
    for model in (plain, sharded):
        model.load_state_dict(dict(sent))
    assert_same_state(sharded, plain)
    with pytest.raises(GTPValueError, match=r"0\.weight: the state dict holds shape \(5, 4\)"):
        sharded.load_state_dict({**sent, "0.weight": torch.zeros(5, 4)})


def test_values_that_a_modules_own_code_rewrites_are_looked_at_when_that_has_run(ranks):
    """C34: a padded vocabulary, an older layout of a weight. They were refused for what they were before."""
    ranks(2).run(_rewritten)


def _after_load():
    plain, sharded = pair(config=gtp.GTPConfig(keep_bytes=1 << 20))
    optimizers = [[torch.optim.SGD(m.parameters(), lr=0.1)] for m in (plain, sharded)]
    train(sharded, optimizers[1], range(2), 0)
    other = Net()
    for model in (plain, sharded):
        model.load_state_dict(other.state_dict())
    ids = torch.arange(6).view(2, 3)
    with torch.no_grad():
        assert torch.equal(sharded(ids), plain(ids))
    # the same data on both ranks, so that the mean over ranks is what one process computes
    losses = [train(m, o, range(3, 5), 0) for m, o in zip((plain, sharded), optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert_same_state(sharded, plain)


def test_a_forward_after_load_uses_the_new_weights(ranks):
    ranks(2).run(_after_load)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


def _tied():
    model = _Tied()
    gtp.shard_model(model, dist.group.WORLD)
    full = gtp.full_state_dict(model)
    assert list(full) == ["embedding.weight", "head.weight"]
    assert full["embedding.weight"] is full["head.weight"]
    wanted = torch.arange(44.0).view(11, 4)
    model.load_state_dict({"embedding.weight": wanted, "head.weight": wanted})
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight.full_tensor(), wanted)


def test_tied_weights_have_both_keys_and_stay_tied(ranks):
    ranks(2).run(_tied)

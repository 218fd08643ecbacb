"""Models that change, differ or cannot work after `shard_model`: noticed where the mistake is, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import gtp
from gtp.testing.ranks import rank, subgroup
from tests.weights.side_by_side import SideBySide, inputs, square


def _small():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class _WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("table", torch.randn(4, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("scalar", torch.rand((), dtype=torch.float64))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.ones(0, 3))
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("transposed", torch.randn(3, 2).t())
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.alias = nn.Module()
        self.alias.register_buffer("table", self.table)

    def forward(self, x):
        return self.norm(self.linear(x))


def _buffers():
    torch.manual_seed(rank())
    model = _WithBuffers()
    model(torch.randn(5, 8))  # running statistics differ from rank to rank
    model.norm.num_batches_tracked += rank()
    kept = model.mask
    gtp.shard_model(model, dist.group.WORLD)
    assert model.mask is kept
    assert model.alias.table is model.table
    values = {name: buffer.to_dense().to(torch.complex128) for name, buffer in model.named_buffers()}
    # training goes on locally, as in FSDP; each rank's statistics are its own from here
    model(torch.full((5, 8), float(rank())))
    return values, model.norm.running_mean.clone()


def test_buffers_start_equal_on_all_ranks(ranks):
    (first, mine), (second, other) = ranks(2).run(_buffers)
    assert {"mask", "table", "scalar", "transposed", "complex", "norm.running_mean", "norm.running_var"} < set(first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert first["norm.num_batches_tracked"] == 1
    assert not torch.equal(mine, other)


def _buffers_that_differ():
    model = _WithBuffers()
    if rank() == 1:
        model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    with pytest.raises(gtp.DesyncError, match=r"buffer mask \(3,\) bool.*buffer mask \(5,\) bool"):
        gtp.shard_model(model, dist.group.WORLD)


def test_buffers_of_unlike_shapes_are_named(ranks):
    ranks(2).run(_buffers_that_differ)


def _ranks_that_freeze_or_tie_differently():
    model = _small()
    model[2].requires_grad_(rank() == 0)
    with pytest.raises(gtp.DesyncError, match=r"2\.weight .*sharded\. Rank 1: 2\.weight .*, frozen"):
        gtp.shard_model(model, dist.group.WORLD)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1 + rank()].weight = model[0].weight
    with pytest.raises(gtp.DesyncError, match=r"0\.weight = 1\.weight .*0\.weight = 2\.weight"):
        gtp.shard_model(model, dist.group.WORLD)


def test_ranks_that_freeze_or_tie_differently_are_named(ranks):
    ranks(2).run(_ranks_that_freeze_or_tie_differently)


def _changes():
    def adapter(model):
        model.add_module("adapter", nn.Linear(4, 4))

    def replaced_bias(model):
        model[0].bias = nn.Parameter(torch.zeros(8))

    def replaced_weight(model):
        model[2].weight = nn.Parameter(torch.zeros(4, 8))

    def replaced_layer(model):
        model[2] = nn.Linear(8, 4)

    for change, name in [
        (adapter, r"adapter\.weight"),
        (replaced_bias, r"0\.bias"),
        (replaced_weight, r"2\.weight"),
        (replaced_layer, r"2\.weight"),
    ]:
        model = _small()
        gtp.shard_model(model, dist.group.WORLD)
        x = inputs(0, 3, 8)[rank()]
        square(model, x).backward()
        change(model)
        for _ in range(2):
            with pytest.raises(gtp.GTPStateError, match=rf"{name}: it was added or replaced after gtp\.shard_model"):
                model(x)


def test_parameters_added_or_replaced_later_are_noticed_at_the_next_forward(ranks):
    ranks(2).run(_changes)


def _fewer():
    """Layers may go, and parameters may be frozen, thawed and re-registered."""
    twins = SideBySide(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
    twins.step(inputs(0, 3, 8))
    for model in (twins.plain, twins.sharded):
        del model[2]
        bias = model[1].bias
        model[1].bias = None
        model[1].bias = bias
    twins.step(inputs(1, 3, 8))


def test_fewer_parameters_are_fine(ranks):
    ranks(2).run(_fewer)


def _reparametrize_and_run(model, reparametrize, x):
    reparametrize(model[0])
    return model(x)


def _reparametrized():
    x = inputs(0, 3, 8)[rank()]
    for reparametrize in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        model = _small()
        gtp.shard_model(model, dist.group.WORLD)
        with pytest.raises(gtp.GTPError, match=r"0\.(weight|parametrizations).*(full weight|after gtp\.shard_model)"):
            _reparametrize_and_run(model, reparametrize, x)
    model = _small()
    parametrizations.weight_norm(model[0])
    gtp.shard_model(model, dist.group.WORLD)  # before is fine: its parts are parameters of their own
    square(model, x).backward()
    assert model[0].parametrizations.weight.original1.grad is not None


def test_reparametrizations_after_sharding_are_refused(ranks):
    ranks(2).run(_reparametrized)


def _functional():
    model = _small()
    gtp.shard_model(model, dist.group.WORLD)
    x = inputs(0, 3, 8)[rank()]
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).sum()

    with pytest.raises(gtp.UnsupportedError, match=r"inside a transform of torch\.func"):
        torch.func.grad(loss)(parameters)
    with pytest.raises(gtp.UnsupportedError, match=r"inside a transform of torch\.func.*batch dimension"):
        torch.func.vmap(model)(x)
    with pytest.raises(gtp.GTPStateError, match=r"0\.weight: a plain tensor stands in its place .*functional_call"):
        loss({name: torch.zeros(8, 8) if name == "0.weight" else p for name, p in parameters.items()})
    square(model, x).backward()
    assert model[0].weight.grad is not None


def test_transforms_of_torch_func_have_their_own_message(ranks):
    ranks(2).run(_functional)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.attention.out_proj.weight = self.first.weight


class _RootTie(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Linear(8, 8)
        self.shared = layer.weight
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class _Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.convolution = nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1)
        self.matrix, self.cube = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(2, 2, 2))
        self.limited = nn.Embedding(8, 8, max_norm=1.0)

    def forward(self, x):
        return self.norm(torch.nn.functional.linear(self.linear(x), self.matrix)) * self.cube.sum()


def _choices():
    model = _Attention()
    other = nn.ModuleList([model, nn.Linear(4, 4)])
    runtime = gtp.shard_model(other, dist.group.WORLD)
    sharded = {line.name: line.sharded for line in runtime.report.lines}
    assert not sharded["0.first.weight"]  # tied to what a fused function reads
    assert sharded["1.weight"]
    twins = SideBySide(_RootTie)
    assert isinstance(twins.sharded.layer.weight, gtp.GTPWeight)  # registered at the root first, used by a Linear
    twins.step(inputs(0, 3, 8))
    for include in ("*", ["*"]):
        twins = SideBySide(_Mixed, include=include)
        lines = {line.name: (line.sharded, line.reason) for line in twins.runtime.report.lines}
        assert [name for name, (sharded, _) in lines.items() if sharded] == ["matrix", "linear.weight"]
        assert lines["cube"][1] == "3-d; a pattern takes matrices, others by their exact name"
        assert "max_norm" in lines["limited.weight"][1]
        twins.step(inputs(0, 3, 8))
    for name, why in [
        ("linear.bias", "bias of Linear"),
        ("convolution.weight", "weight of Conv1d"),
        ("limited.weight", "max_norm"),
    ]:
        with pytest.raises(gtp.GTPValueError, match=rf"{name} cannot be sharded: .*{why}"):
            gtp.shard_model(_Mixed(), dist.group.WORLD, include=["matrix", name])


def test_what_cannot_work_with_a_shard_stays_whole(ranks):
    ranks(2).run(_choices)


def _meta_tie():
    with torch.device("meta"):
        model = _RootTie()
    gtp.shard_model(model, dist.group.WORLD)
    assert model.shared is model.layer.weight
    assert model.shared.full_tensor().abs().sum() > 0


def test_a_tie_registered_at_the_root_is_initialized_by_the_layer(ranks):
    ranks(2).run(_meta_tie)


def _lazy():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))
    with pytest.raises(gtp.GTPValueError, match=r"0\.weight has no shape yet.*LazyLinear.*Run one forward"):
        gtp.shard_model(model, dist.group.WORLD)
    model(torch.ones(2, 3))
    gtp.shard_model(model, dist.group.WORLD)
    assert model[0].weight.logical_shape == (8, 3)


def test_lazy_modules_are_named_before_they_have_a_shape(ranks):
    ranks(2).run(_lazy)


def _groups_of_buffers():
    """A mapping from names to groups is asked for buffers, too."""
    half = [subgroup((r,)) for r in range(2)][rank()]
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    for layer in model[1:]:
        layer.running_mean.fill_(float(rank() + 1))
    gtp.shard_model(model, {"1.*": half, "*": dist.group.WORLD})
    assert model[1].running_mean[0] == rank() + 1
    assert model[2].running_mean[0] == 1


def test_buffers_follow_their_names_group(ranks):
    ranks(2).run(_groups_of_buffers)


def _as_pasted(code):
    namespace = {}
    exec(code, namespace)
    return namespace["sum_of_ranks"](3.0)


def test_the_example_of_a_multi_rank_test_in_contributing_runs_as_pasted(ranks):
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert "def test_sum(ranks)" in code
    assert ranks(2).run(_as_pasted, code) == [3.0, 3.0]

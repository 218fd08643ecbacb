"""Weights seen from outside their layer: used by other functions, read, written, merged, counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.testing.collectives import late_collectives
from gtp.testing.ranks import rank
from tests.reference import full
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(22, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 22, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids))


def _ids(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(22, (3, 4), generator=generator) for _ in range(dist.get_world_size())]


def _whole(weight):
    """The documented access to a weight's full value."""
    return weight.full_tensor() if isinstance(weight, gtp.GTPWeight) else weight


def _by_product(model, ids):
    """The head's weight given to a loss directly, as fused losses take it."""
    logits = model(ids) @ _whole(model.head.weight).t()
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _by_linear(model, ids):
    logits = F.linear(model(ids), model.head.weight)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _in_slices(model, ids):
    """A slice of the vocabulary at a time, without the logits of all."""
    h = model(ids).flatten(0, 1)
    parts = [torch.logsumexp(h @ part.t(), dim=1) for part in _whole(model.head.weight).split(8)]
    chosen = (h * _whole(model.head.weight)[ids.flatten()]).sum(1)
    return (torch.logsumexp(torch.stack(parts), dim=0) - chosen).mean()


def _elementwise(model, ids):
    """Weight noise, weight normalization, a penalty: any function, by the full tensor."""
    w = _whole(model.body.weight)
    x = model.table(ids) @ (w / w.norm(dim=1, keepdim=True)).t()
    return (model.head(x + w.mean()) ** 2).mean() + (w**2).sum()


LOSSES = {f.__name__.strip("_"): f for f in (_by_product, _by_linear, _in_slices, _elementwise)}


def _outside(name):
    twins = SideBySide(LanguageModel, **ROUNDED)
    with late_collectives():
        for step in range(3):
            twins.step(_ids(step), LOSSES[name])


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_used_outside_its_layer_by_the_documented_access(ranks, name):
    """C65."""
    ranks(2).run(_outside, name)


def _undocumented(requires_grad):
    """Without it: an error that names the weight, in grad mode and out of it, and nothing broadcasts."""
    model = LanguageModel()
    gtp.shard_model(model, dist.group.WORLD)
    model.requires_grad_(requires_grad)
    x, w = torch.ones(3, 16), model.head.weight
    one = torch.ones(1, 16)
    calls = [lambda: x @ w.t(), lambda: torch.matmul(x, w.t()), lambda: x + w, lambda: w + x, lambda: x.add_(w)]
    calls += [lambda: torch.cat([one, w]), lambda: w[0], lambda: w.sum(0)]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for call in calls:
            with mode(), pytest.raises(gtp.GTPError, match=r"sharded weight 'head\.weight'.*full_tensor\(\)"):
                call()
    assert torch.equal(x, torch.ones(3, 16))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_without_it_the_weight_is_named_and_nothing_broadcasts(ranks, requires_grad):
    """C65."""
    ranks(2).run(_undocumented, requires_grad)


def _read_and_written():
    twins = SideBySide(LanguageModel)
    twins.step(_ids(0), _by_linear)
    names = ["table.weight", "body.weight", "head.weight"]
    with gtp.full_weights(twins.sharded) as weights:
        assert list(weights) == names
        assert sum(w.numel() for w in weights.values()) == sum(p.numel() for p in twins.plain.parameters()) - 16
        for name, weight in weights.items():
            assert torch.equal(weight, twins.plain.get_parameter(name))
    down, up = torch.randn(2, 16), torch.randn(16, 2)
    dist.broadcast(down, 0)
    dist.broadcast(up, 0)
    with gtp.full_weights(twins.sharded, write=True) as weights:
        weights["table.weight"] += 1  # in place
        weights["body.weight"] = weights["body.weight"] + up @ down  # a low-rank update merged
    with torch.no_grad():
        twins.plain.table.weight += 1
        twins.plain.body.weight += up @ down
    twins.check_parameters()
    twins.step(_ids(1), _by_linear)  # the next forward uses them, and they train
    with pytest.raises(gtp.GTPValueError, match=r"^weight: full_weights needs the logical shape \(16, 16\), got"):
        with gtp.full_weights(twins.sharded.body, write=True) as weights:
            weights["weight"] = torch.zeros(8, 16)
    twins.check_parameters()
    assert twins.runtime.report.num_parameters == sum(p.numel() for p in twins.plain.parameters())


def test_full_weights_are_read_changed_and_merged(ranks):
    """C67."""
    ranks(2).run(_read_and_written)


def _written_in_every_way():
    twins = SideBySide(LanguageModel, **ROUNDED)
    head = twins.plain.head.weight.detach()
    ways = {
        "data": lambda w: w["head.weight"].data.mul_(0.5),
        "detached": lambda w: w["head.weight"].detach().mul_(0.5),
        "numpy": lambda w: w["head.weight"].numpy().__imul__(0.5),
        "rows": lambda w: w["head.weight"][3:].mul_(0.5),
        "replaced": lambda w: w.update({"head.weight": w["head.weight"] * 0.5}),
    }
    for name, write in ways.items():
        before = head.clone()
        with gtp.full_weights(twins.sharded, write=True) as weights:
            write(weights)
        head[3 if name == "rows" else 0 :].mul_(0.5)
        assert not torch.equal(before, head)
        twins.check_parameters()
        with pytest.raises(gtp.GTPValueError, match=r"^head\.weight: changed inside a read-only"):
            with gtp.full_weights(twins.sharded) as weights:
                write(weights)
        twins.check_parameters()
    with pytest.raises(gtp.GTPValueError, match=r"^head: .*no sharded weight has that name.*head\.weight"):
        with gtp.full_weights(twins.sharded, write=True) as weights:
            weights["head"] = weights["head.weight"].zero_()
    with pytest.raises(gtp.GTPValueError, match=r"^head\.weight: .*logical shape \(22, 16\), got None"):
        with gtp.full_weights(twins.sharded, write=True) as weights:
            weights.update({"body.weight": torch.zeros(16, 16), "head.weight": None})
    twins.check_parameters()  # a refused context changes nothing
    with torch.inference_mode(), gtp.full_weights(twins.sharded) as weights:
        assert torch.equal(weights["head.weight"], head)
    # a weight that is trained meanwhile is not put back
    with gtp.full_weights(twins.sharded, write=True) as weights:
        twins.step(_ids(1), _by_linear)
        assert not torch.equal(weights["body.weight"], twins.plain.body.weight)
    twins.check_parameters()


def test_what_is_written_into_full_weights_is_kept_however_it_is_written(ranks):
    """C67."""
    ranks(3).run(_written_in_every_way)


def _averaged():
    """An average of weights kept on one rank's side as full tensors, and as shards; both are the average."""
    twins = SideBySide(LanguageModel)
    weight = twins.sharded.head.weight
    whole, rows = weight.full_tensor().clone(), weight.detach().clone()
    for step in range(3):
        twins.step(_ids(step), _by_linear)
        whole.lerp_(full(weight), 0.5)
        with torch.no_grad():
            rows.lerp_(weight.detach(), 0.5)
    assert whole.shape == (22, 16)
    start = weight.layout.row_range()[0]
    assert torch.equal(rows.shard, whole[start : start + weight.layout.valid_rows])
    return weight.layout.valid_rows


def test_averages_of_weights_are_of_the_right_rows(ranks):
    """C67."""
    assert ranks(2).run(_averaged) == [11, 11]


def _counted():
    model = LanguageModel()
    gtp.shard_model(model, dist.group.WORLD)
    weight = model.head.weight
    assert weight.logical_shape == (22, 16)
    assert repr(weight).startswith("GTPWeight('head.weight', shard (6, 16) of (22, 16), rows ")
    assert f"rank {rank()} of 4" in repr(weight)
    square(model, _ids(0)[rank()]).backward()
    assert weight.grad is None  # the head was not used
    return weight.layout.valid_numel, tuple(weight.full_tensor().shape)


def test_counts_and_shapes_are_the_logical_ones(ranks):
    """C67."""
    answers = ranks(4).run(_counted)
    assert sum(count for count, _ in answers) == 22 * 16
    assert {shape for _, shape in answers} == {(22, 16)}


def _written_on_one_rank():
    """What numpy writes lies in one rank's rows, and all ranks must know that the weights were written."""
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))
    twins.plain[0].weight.detach().numpy()[0] += 1
    with gtp.full_weights(twins.sharded, write=True) as full:
        full["0.weight"].numpy()[0] += 1
    versions = [p._version for p in twins.sharded.parameters()]
    twins.check_parameters()
    twins.step(inputs(0, 3, 6))
    weight = twins.sharded[0].weight
    with pytest.raises(gtp.errors.GTPValueError, match=r"0\.weight: \.data .* must be contiguous.*strides \(1, 4\)"):
        weight.data = torch.randn(weight.shard.t().shape).t()
    twins.step(inputs(1, 3, 6))
    return versions


def test_a_write_by_numpy_is_one_on_every_rank(ranks):
    """C67."""
    first, second = ranks(2).run(_written_on_one_rank)
    assert first == second

"""Groups by name pattern, dense and expert axes, the (replicate, gtp) mesh: the numbers of data parallelism."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtp
from gtp.modules import GroupedLinear
from gtp.protocol import finalize_weight_grads, weight_grad_buffers
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.ranks import rank, subgroup
from tests.reference import assert_same_gradients, assert_same_parameters, data_parallel_backward
from tests.weights.side_by_side import ROUNDED, SideBySide, adamw, inputs, square


class Mixture(nn.Module):
    """A dense trunk and experts; each token goes to the expert that its row number says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)
        self.experts = GroupedLinear(3, 12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x))
        return self.down(h + self.experts(h, [2, 0, x.shape[0] - 2]))


def _axes(name):
    """World 4: two GTP groups of two, next to each other or across; a mesh; all ranks."""
    pairs, across = [subgroup((0, 1)), subgroup((2, 3))], [subgroup((0, 2)), subgroup((1, 3))]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    transposed = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "gtp"))
    assert {pairs[rank() // 2].size(), across[rank() % 2].size()} == {2}
    return {
        "mesh": mesh,
        "named_slice": init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "dp"))["gtp", "dp"],
        "one_shard_four_replicas": transposed,
        "experts_over_all": {"experts.*": dist.group.WORLD, "*": mesh},
        "dense_over_all": {"experts.*": mesh, "*": dist.group.WORLD},
        "first_match_wins": {"*.weight": mesh, "up.*": dist.group.WORLD, "*": dist.group.WORLD},
    }[name]


SIZES = {  # ranks that the rows of up.weight and of the experts' weights are split over
    "mesh": (2, 2),
    "named_slice": (2, 2),
    "one_shard_four_replicas": (1, 1),
    "experts_over_all": (2, 4),
    "dense_over_all": (4, 2),
    "first_match_wins": (2, 4),
}


def _trains(name, reduce):
    """Wherever a parameter lives, its gradient is that of all four ranks."""
    torch.manual_seed(7)
    config = gtp.GTPConfig(grad_reduce=reduce, alignment=2)
    plain, sharded = Mixture(), Mixture()
    sharded.load_state_dict(plain.state_dict())
    runtime = gtp.shard_model(sharded, _axes(name), config=config)
    optimizers = [adamw(model.parameters()) for model in (plain, sharded)]
    with late_collectives():
        for step in range(3):
            every = inputs(step, 5, 8)
            data_parallel_backward(plain, every, square, reduce=reduce)
            square(sharded, every[rank()]).backward()
            assert_same_gradients(sharded, plain, **ROUNDED)
            norms = [torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
            norms.append(gtp.clip_grad_norm_(sharded.parameters(), 0.5))
            torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(sharded, plain, **ROUNDED)
    lines = {line.name: line.ranks for line in runtime.report.lines}
    experts = {lines[f"experts.weight{i}"] for i in range(3)}
    assert len(experts) == 1
    return lines["up.weight"], experts.pop()


@pytest.mark.parametrize("name", SIZES)
def test_axes_change_where_rows_lie_and_no_number(ranks, name):
    assert ranks(4).run(_trains, name, "mean") == [SIZES[name]] * 4


def test_gradients_are_added_over_both_axes_where_sums_are_asked_for(ranks):
    for name in ("mesh", "experts_over_all"):
        assert ranks(4).run(_trains, name, "sum") == [SIZES[name]] * 4


def _expert_parallel():
    """Experts that other ranks do not have: their groups are the ranks that hold the same ones, (0, 2) and (1, 3)."""

    def build():
        torch.manual_seed(3)
        trunk = nn.Linear(8, 8)
        torch.manual_seed(7 + rank() % 2)
        experts = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        return nn.ModuleDict({"trunk": trunk, "experts": experts})

    plain, sharded = build(), build()
    across = [subgroup((0, 2)), subgroup((1, 3))][rank() % 2]
    runtime = gtp.shard_model(sharded, {"experts.*": across, "*": dist.group.WORLD})
    every = inputs(0, 3, 8)

    def loss(model, x):
        return square(lambda y: model["experts"](model["trunk"](y)), x)

    loss(sharded, every[rank()]).backward()
    # the experts see two ranks' tokens; the trunk all four's, through experts that this rank does not have
    mine = [every[r] for r in (rank() % 2, rank() % 2 + 2)]
    data_parallel_backward(plain, mine, loss)
    for parameter in plain["trunk"].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 4  # of two means over ranks 0 and 2, two over 1 and 3
    assert_same_gradients(sharded, plain, **ROUNDED)
    return {line.name: line.ranks for line in runtime.report.lines if line.sharded}


def test_experts_of_this_rank_only(ranks):
    for sizes in ranks(4).run(_expert_parallel):
        assert sizes == {"trunk.weight": 4, "experts.0.weight": 2, "experts.2.weight": 2}


def _bad_axes():
    model = Mixture()
    world = dist.group.WORLD
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "gtp"))
    cases = [
        (cube, r"1-d mesh \(gtp\) or a 2-d mesh \(replicate, gtp\), got 3 dims.*Slice it"),
        ({}, "mapping from name pattern to group is empty"),
        (
            {"experts.*": world},
            r"up\.weight matches none of the group mapping's patterns \('experts\.\*'\)",
        ),
        ({"expert.*": world, "*": world}, r"group mapping pattern 'expert\.\*' matches no parameter\. Near names: "),
        ({0: world}, "has a key that is no string: 0"),
        ("world", "takes a ProcessGroup or a DeviceMesh, got str: 'world'.*group.WORLD"),
        ({"*": 4}, "takes a ProcessGroup or a DeviceMesh, got int: 4"),
        (dist.GroupMember.NON_GROUP_MEMBER, rf"rank {rank()} is not in the group it was given"),
        ({"experts.weight0": subgroup((0, 1, 2, 3)), "*": cube["replicate", "gtp"]}, "uses 3 weights as one group"),
    ]
    for axes, message in cases:
        with pytest.raises(gtp.GTPValueError, match=message):
            gtp.shard_model(model, axes)
    gtp.shard_model(model, cube["replicate", "gtp"])  # untouched by what was refused
    return sum(isinstance(p, gtp.GTPWeight) for p in model.parameters())


def test_groups_that_cannot_work_are_refused_by_name(ranks):
    """C91."""
    assert ranks(4).run(_bad_axes) == [5] * 4


def _other_order():
    torch.manual_seed(3)
    layer, other = GroupedLinear(3, 6, 5, bias=False), GroupedLinear(3, 6, 5, bias=False)
    plain = copy.deepcopy(layer)
    gtp.shard_model(nn.ModuleList([layer, other]), dist.group.WORLD)
    first, second, third = layer.parameters()
    x = inputs(0, 4, 6)
    for weights in ([first, third, second], [first, first, first]):
        with pytest.raises(gtp.GTPValueError, match=r"it is weight \d of those .* was given as weight 1\."):
            gtp.ops.grouped_linear(x[rank()], [0, 2, 2], weights)
        with pytest.raises(gtp.GTPStateError, match=r"weight\d was used in the place of 0\.weight1: .*0\.weight1"):
            finalize_weight_grads(weights, weight_grad_buffers(weights))  # an op of somebody else's
        assert all(w.grad is None for w in (first, second, third))
    strangers = [first, list(other.parameters())[1], third]
    with pytest.raises(gtp.GTPValueError, match=r"given as weight 1 with .*0\.weight0.*, which it is not gathered"):
        gtp.ops.grouped_linear(x[rank()], [0, 2, 2], strangers)
    with pytest.raises(gtp.GTPStateError, match=r"1\.weight1 was used in the place of 0\.weight1"):
        finalize_weight_grads(strangers, weight_grad_buffers(strangers))
    data_parallel_backward(plain, x, lambda m, b: m(b, [0, 2, 2]).sum())
    layer(x[rank()], [0, 2, 2]).sum().backward()
    assert_same_gradients(layer, plain)


def test_experts_in_another_order_than_they_are_gathered_in_are_refused(ranks):
    """The leader answers for all, and so each expert computed with the weight of its place."""
    ranks(2).run(_other_order)


class _TiedExperts(nn.Module):
    """Two layers of experts; `tie` says which of their weights are the same parameters."""

    def __init__(self, tie) -> None:
        super().__init__()
        self.first, self.second, self.last = (GroupedLinear(2, 8, 8, bias=False) for _ in range(3))
        for target, source in tie.items():
            owner, attribute = target.split(".")
            setattr(getattr(self, owner), attribute, self.get_parameter(source))

    def forward(self, x):
        splits = [1, x.shape[0] - 1]
        return self.last(self.second(self.first(x, splits), splits), splits)


def _tied_experts():
    whole = {"second.weight0": "first.weight0", "second.weight1": "first.weight1"}
    twins = SideBySide(lambda: _TiedExperts(whole), **ROUNDED)
    assert len(list(twins.sharded.parameters())) == 4
    for step in range(3):
        twins.step(inputs(step, 3, 8))
    part = {"second.weight0": "first.weight0"}
    crossed = {"second.weight0": "first.weight1", "second.weight1": "first.weight0"}
    twice = {"first.weight1": "first.weight0"}
    for tie, message in [
        (part, r"first\.weight0 = second\.weight0: .*two groups of weights \(first\.weight0, first\.weight1; and"),
        (crossed, r"first\.weight1 = second\.weight0: .*two groups of weights"),
        (twice, r"first\.weight0 = first\.weight1: .*twice in one group"),
    ]:
        with pytest.raises(gtp.GTPValueError, match=rf"{message}.*Tie whole groups.*exclude="):
            gtp.shard_model(_TiedExperts(tie), dist.group.WORLD)
        twins = SideBySide(lambda tie=tie: _TiedExperts(tie), exclude=["first.*", "second.*"], **ROUNDED)
        twins.step(inputs(5, 3, 8))


def test_tied_experts_train_as_whole_groups_and_are_refused_otherwise(ranks):
    """C11: a group's leader answers for the group, and would give another one the wrong weights."""
    ranks(3).run(_tied_experts)


def _coalesced_by_training_a_mixture():
    model = Mixture()
    gtp.shard_model(model, dist.group.WORLD)
    optimizer = adamw(model.parameters())
    with collective_log() as log:
        for step in range(2):
            square(model, inputs(step, 6, 8)[rank()]).backward()
            gtp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    started = log.started("all_gather_into_tensor")
    assert sum(record.shape == (12, 12) for record in started) >= 2 * 3  # each of three experts, in two forwards
    return [record.kind for record in log.started() if record.coalesced]


def test_nothing_is_coalesced_on_gloo(ranks):
    """Its threads damage the heap then: see [Note: nothing is coalesced on gloo] in gtp/runtime/process_group.py."""
    assert ranks(2).run(_coalesced_by_training_a_mixture) == [[], []]

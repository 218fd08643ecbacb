"""Row counts that ranks do not divide, padding that nobody sees, parameters smaller than the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank, subgroup
from tests.reference import full, full_grad
from tests.weights.side_by_side import ROUNDED, SideBySide, adamw, inputs


def _two_layers():
    return nn.Sequential(nn.Linear(24, 10), nn.GELU(), nn.Linear(10, 7))


def _uneven_training():
    twins = SideBySide(_two_layers, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2), **ROUNDED)
    for step in range(3):
        twins.step(inputs(step, 5, 24))
    first, _, last = twins.sharded
    assert first.weight.logical_shape == (10, 24)
    assert last.weight.logical_shape == (7, 10)
    assert twins.runtime.report.num_parameters == sum(p.numel() for p in twins.plain.parameters())
    # a full state dict in, the model's own out and in
    state = {name: value + 1 for name, value in twins.plain.state_dict().items()}
    twins.plain.load_state_dict(state)
    twins.sharded.load_state_dict(state)
    twins.check_parameters()
    own = twins.sharded.state_dict()
    assert {n: tuple(v.shape) for n, v in own.items()} == {n: tuple(v.shape) for n, v in state.items()}
    saved = {name: value.clone() for name, value in own.items()}
    with torch.no_grad():
        for parameter in twins.sharded.parameters():
            parameter.zero_()
    twins.sharded.load_state_dict(saved)
    twins.check_parameters()
    return [(p.layout.shard_shape, p.layout.valid_numel) for p in (first.weight, last.weight)]


def test_rows_that_do_not_divide(ranks):  # C16
    by_rank = ranks(4).run(_uneven_training)
    assert [shapes[0][0] for shapes in by_rank] == [(3, 24)] * 4
    assert sum(shapes[0][1] for shapes in by_rank) == 10 * 24
    assert sum(shapes[1][1] for shapes in by_rank) == 7 * 10


ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 17]


class ManyRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=-2)
        self.layers = nn.ModuleList(nn.Linear(6, rows, bias=rows % 2 == 0) for rows in ROWS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def _every_row_count(alignment):
    twins = SideBySide(ManyRows, optimizer=adamw, config=gtp.GTPConfig(alignment=alignment), **ROUNDED)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        twins.step([torch.randint(11, (3, 4), generator=generator) for _ in range(twins.size)])
    for parameter in twins.sharded.parameters():
        if isinstance(parameter, gtp.GTPWeight):
            assert parameter.layout.shard_rows % alignment == 0
            assert torch.count_nonzero(parameter.shard[parameter.layout.valid_rows :]) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_every_small_row_count_at_every_alignment(ranks, size):
    for alignment in (1, 3, 8):
        ranks(size).run(_every_row_count, alignment)


class StepByRows(torch.optim.Optimizer):
    """Scales by the matrix's rows, as whole-matrix optimizers do; of a sharded weight it asks the logical shape."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rows = getattr(p, "logical_shape", p.shape)[0]
                norm = torch.linalg.vector_norm(p.grad)
                p.mul_(0.99).add_(p.grad, alpha=-float(rows**0.5 / norm))


def _padding_is_nobody(rows):
    twins = SideBySide(
        lambda: nn.Linear(8, rows, bias=False), optimizer=StepByRows, config=gtp.GTPConfig(alignment=16), **ROUNDED
    )
    weight, reference = twins.sharded.weight, twins.plain.weight
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        grad = torch.randn(rows, 8, generator=generator)
        local = torch.full(weight.shape, 7.0)  # a careless 7 in the padding, which must not survive
        layout = weight.layout
        local[layout.valid_slice] = grad[layout.shard_slice]
        weight.grad, reference.grad = local, grad
        assert torch.equal(full_grad(weight), grad)
        for order in (1.0, 2.0, float("inf")):
            wanted = torch.linalg.vector_norm(grad, order)
            torch.testing.assert_close(torch.linalg.vector_norm(weight.grad, order), wanted)
            torch.testing.assert_close(gtp.grad_norm(twins.sharded.parameters(), order), wanted)
        twins.update()
    assert torch.count_nonzero(weight.shard[weight.layout.valid_rows :]) == 0
    assert twins.runtime.report.num_parameters == rows * 8
    return weight.layout.shard_rows, weight.layout.shard_rows - weight.layout.valid_rows


def test_padding_counts_nowhere_and_stays_zero(ranks):  # C18
    assert ranks(2).run(_padding_is_nobody, 40) == [(32, 0), (32, 24)]
    assert ranks(4).run(_padding_is_nobody, 70) == [(32, 0), (32, 0), (32, 26), (32, 32)]


def _padding_under_every_optimizer_and_loader():
    twins = SideBySide(lambda: nn.Linear(8, 5), optimizer=adamw, config=gtp.GTPConfig(alignment=4), **ROUNDED)
    weight = twins.sharded.weight
    for step in range(5):
        twins.step(inputs(step, 3, 8))
    padding = weight.shard[weight.layout.valid_rows :]
    assert padding.numel() == (0, 3 * 8)[rank()]
    with torch.no_grad():
        for write in (lambda: weight.fill_(2.0), lambda: weight.add_(1.0), lambda: torch._foreach_add_([weight], 1.0)):
            write()
            assert torch.count_nonzero(padding) == 0
            assert torch.equal(full(weight), torch.full((5, 8), full(weight)[0, 0].item()))


def test_writes_never_leave_values_in_padding(ranks):
    ranks(2).run(_padding_under_every_optimizer_and_loader)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift


def _tiny(group_size):
    members = tuple(range(group_size)) if rank() < group_size else tuple(range(group_size, 2 * group_size))
    groups = {m: subgroup(m) for m in (tuple(range(group_size)), tuple(range(group_size, 2 * group_size))) if m[-1] < 4}
    if groups.get(members) is None:
        return None
    twins = SideBySide(Tiny, group=groups[members], **ROUNDED)
    for step in range(3):
        twins.step(inputs(step, 3, 4, count=group_size))
    reasons = {line.name: line.sharded for line in twins.runtime.report.lines}
    with pytest.raises(gtp.GTPValueError, match="shift: a weight is sharded along its rows"):
        gtp.shard_model(Tiny(), groups[members], include=["shift"])
    return reasons


def test_parameters_of_one_element(ranks):  # C20
    for size in (1, 2, 4):
        for reasons in ranks(4).run(_tiny, size):
            if reasons is not None:
                assert reasons == {"scale": False, "shift": False, "linear.weight": True, "linear.bias": False}


def _one_element_sharded():
    model = Tiny()
    gtp.shard_model(model, dist.group.WORLD, include=["scale", "linear.weight"])
    with pytest.raises(gtp.UnsupportedError, match=r"'scale'.*needs the full weight \(1,\)"):
        model(torch.ones(2, 4))


def test_a_sharded_vector_in_arithmetic_is_refused_by_name(ranks):
    ranks(2).run(_one_element_sharded)

"""Muon on sharded matrices against `torch.optim.Muon` on the whole ones, bit for bit.

Both run the same operations on the same full matrix, so there is nothing to round differently, whatever the number of
ranks; gradients are given, the same numbers to both. Run one: `pytest tests/optim/test_muon.py -k padding`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.errors import GTPValueError, UnsupportedError
from gtp.optim import Muon, orthogonalize
from tests.reference import assert_same_parameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# wide, tall and square; more than ranks, so that rounds are full and not full; rows that nothing divides
SHAPES = ((8, 40), (8, 70), (30, 7), (16, 16), (5, 3))


def matrices() -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleList(nn.Linear(cols, rows, bias=False) for cols, rows in SHAPES)


def give_gradients(model: nn.Module, step: int) -> None:
    """The same full gradients to a plain model and, cut to rows, to a sharded one."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        is_sharded = isinstance(parameter, gtp.GTPWeight)
        full = torch.randn(tuple(parameter.logical_shape if is_sharded else parameter.shape), generator=generator)
        if is_sharded:
            layout = parameter.layout
            # the padding is noise: nothing of it may count
            local = torch.randn(layout.shard_shape)
            local[layout.valid_slice] = full[layout.shard_slice]
            full = local
        parameter.grad = full


def _matches_torch(config, options, compute_dtype):
    plain = matrices()
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD, config=config)
    if compute_dtype == torch.bfloat16:
        reference = torch.optim.Muon(plain.parameters(), lr=0.02, **options)
    else:
        reference = Muon(plain.parameters(), lr=0.02, compute_dtype=compute_dtype, **options)
    ours = Muon(sharded.parameters(), lr=0.02, compute_dtype=compute_dtype, **options)
    for step in range(5):
        give_gradients(plain, step)
        give_gradients(sharded, step)
        reference.step()
        ours.step()
        assert_same_parameters(sharded, plain)
    for weight in sharded.parameters():
        assert not weight.plain_shard()[weight.layout.valid_rows :].any()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_padded_shards_step_as_the_whole_matrices_do(ranks, size, compute_dtype):
    ranks(size).run(_matches_torch, gtp.GTPConfig(alignment=16), {}, compute_dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=["plain_momentum", "match_rms", "polynomial"],
)
def test_every_setting_means_what_it_means_in_torch(ranks, options):
    ranks(2).run(_matches_torch, gtp.GTPConfig(), options, torch.bfloat16)


def test_the_scale_follows_the_logical_shape():
    """[70, 8] at alignment 16 over 4 ranks has 128 padded rows; by them a step would be 1.35 times as long."""
    weight = nn.Parameter(torch.zeros(70, 8))
    weight.grad = torch.randn(70, 8, generator=torch.Generator().manual_seed(0))
    optimizer = Muon([weight], lr=1.0, weight_decay=0.0, compute_dtype=torch.float64)
    optimizer.step()
    direction = orthogonalize(weight.grad, COEFFICIENTS, 5, 1e-7, torch.float64)
    # momentum and look-ahead scale the first gradient, which orthogonalization undoes but for fp32 rounding
    torch.testing.assert_close(weight.double(), -((70 / 8) ** 0.5) * direction, rtol=1e-5, atol=1e-6)


def test_orthogonalization_brings_singular_values_near_one():
    for shape in ((12, 5), (5, 12), (9, 9)):
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        result = orthogonalize(matrix, COEFFICIENTS, 5, 1e-7, torch.float64)
        # the polynomial acts on singular values alone: U and V stay
        values = torch.linalg.diagonal(u.T @ result @ vh.T)
        torch.testing.assert_close(u @ torch.diag(values) @ vh, result, rtol=1e-9, atol=1e-9)
        assert values.min() > 0.3
        assert values.max() < 1.3
        assert (s / s[0]).min() < 0.5  # they were not near each other before


def _frozen_and_replicated():
    plain = matrices()
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD, exclude="1.weight")
    pairs = [(plain, torch.optim.Muon(plain.parameters(), lr=0.1)), (sharded, Muon(sharded.parameters(), lr=0.1))]
    for step in range(3):
        for model, optimizer in pairs:
            give_gradients(model, step)
            model[0].weight.grad = None
            optimizer.step()
    assert torch.equal(sharded[0].weight.full_tensor(), plain[0].weight)
    assert_same_parameters(sharded, plain)
    give_gradients(sharded, 9)
    refusal = r"'0\.weight'.*Tensor\.T needs the full weight \(40, 8\).*gtp\.optim\.Muon"
    with pytest.raises(UnsupportedError, match=refusal):
        torch.optim.Muon([sharded[0].weight]).step()


def test_parameters_without_gradient_and_replicated_ones_are_served(ranks):
    ranks(2).run(_frozen_and_replicated)


def _trains_in_a_model():
    def loss_of(model, data):
        return model(data).square().mean()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 6))
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD)
    optimizers = []
    for model, muon in ((plain, torch.optim.Muon), (sharded, Muon)):
        hidden, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
        optimizers.append([muon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=0.01)])
    for step in range(4):
        data = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for model, both in zip((plain, sharded), optimizers, strict=True):
            # every rank has the same data: the mean over two ranks is the value itself
            loss_of(model, data).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(sharded, plain)


def test_muon_and_adamw_train_a_model_together(ranks):
    ranks(2).run(_trains_in_a_model)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


def _refuses_sharded():
    model = nn.Sequential(nn.Linear(4, 6), Scale())
    gtp.shard_model(model, dist.group.WORLD, include=["0.weight", "1.scale"])
    with pytest.raises(GTPValueError, match=r"1\.scale: Muon orthogonalizes matrices, .* shape \(6,\).*AdamW"):
        Muon([model[0].weight, model[1].scale])


def test_what_is_no_matrix_is_refused_by_name(ranks):
    ranks(2).run(_refuses_sharded)
    with pytest.raises(GTPValueError, match=r"parameter 1 of the group: .* shape \(2, 3, 4\)"):
        Muon([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3, 4))])


def _state_of_whole_matrices():
    plain = matrices()
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD)
    theirs, ours = torch.optim.Muon(plain.parameters()), Muon(sharded.parameters())
    give_gradients(plain, 0)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    give_gradients(sharded, 0)
    with pytest.raises(GTPValueError, match=r"0\.weight: .* shape \(40, 8\).*\(20, 8\).*load_optimizer_state_dict"):
        ours.step()


def test_state_of_a_plain_models_optimizer_says_how_it_is_loaded(ranks):
    ranks(2).run(_state_of_whole_matrices)


@pytest.mark.parametrize(
    "setting",
    [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"ns_steps": 0}, {"adjust_lr_fn": "none"}, {"eps": 0.0}],
)
def test_a_setting_out_of_range_is_refused_by_name(setting):
    ((name, value),) = setting.items()
    with pytest.raises(GTPValueError, match=rf"Muon: {name} must be .*, got {value!r}"):
        Muon([nn.Parameter(torch.zeros(2, 3))], **setting)


def test_a_refused_group_is_not_kept():
    optimizer = Muon([nn.Parameter(torch.zeros(2, 3))])
    with pytest.raises(GTPValueError, match="no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1

"""`Linear` and `LayerNormLinear`: Transformer Engine's names and defaults, on plain weights and on fakes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gtp.errors import GTPValueError, UnsupportedError
from gtp.modules import GroupedLinear, LayerNormLinear, Linear
from tests.ops.managed import exact_fake

MODULES = {
    "Linear": lambda **k: Linear(6, 5, **k),
    "LayerNormLinear": lambda **k: LayerNormLinear(6, 5, **k),
    "RMSNormLinear": lambda **k: LayerNormLinear(6, 5, normalization="RMSNorm", **k),
    "GroupedLinear": lambda **k: GroupedLinear(2, 6, 5, **k),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, [3, 1]) if isinstance(module, GroupedLinear) else module(x)


def test_linear_computes_linear() -> None:
    module, x = Linear(6, 5), torch.randn(2, 3, 6)
    nn.init.normal_(module.bias)
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
    unbiased = Linear(6, 5, bias=False)
    assert torch.equal(unbiased(x), F.linear(x, unbiased.weight))


@pytest.mark.parametrize("zero_centered", [True, False])
def test_layernorm_linear_computes_norm_then_linear(zero_centered: bool) -> None:
    module, x = LayerNormLinear(6, 5, eps=1e-3, zero_centered_gamma=zero_centered), torch.randn(2, 3, 6)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    scale = module.layer_norm_weight + zero_centered
    normed = F.layer_norm(x, (6,), scale, module.layer_norm_bias, 1e-3)
    assert torch.equal(module(x), F.linear(normed, module.weight, module.bias))


@pytest.mark.parametrize("zero_centered", [True, False])
def test_rmsnorm_linear_computes_norm_then_linear(zero_centered: bool) -> None:
    module = LayerNormLinear(6, 5, normalization="RMSNorm", zero_centered_gamma=zero_centered)
    x = torch.randn(2, 3, 6)
    nn.init.normal_(module.layer_norm_weight)
    normed = F.rms_norm(x, (6,), module.layer_norm_weight + zero_centered, 1e-5)
    assert torch.equal(module(x), F.linear(normed, module.weight, module.bias))


def test_parameters_and_their_order_are_transformer_engines() -> None:
    names = {kind: [n for n, _ in make().named_parameters()] for kind, make in MODULES.items()}
    assert names == {
        "Linear": ["weight", "bias"],
        "LayerNormLinear": ["layer_norm_weight", "layer_norm_bias", "weight", "bias"],
        "RMSNormLinear": ["layer_norm_weight", "weight", "bias"],
        "GroupedLinear": ["weight0", "bias0", "weight1", "bias1"],
    }
    assert [n for n, _ in Linear(6, 5, bias=False).named_parameters()] == ["weight"]
    assert Linear(6, 5, bias=False).bias is None
    assert LayerNormLinear(6, 5, normalization="RMSNorm").layer_norm_bias is None


def test_defaults_are_transformer_engines() -> None:
    module = LayerNormLinear(200, 300)
    assert torch.equal(module.bias, torch.zeros(300))
    assert torch.equal(module.layer_norm_weight, torch.ones(200))
    assert torch.equal(module.layer_norm_bias, torch.zeros(200))
    # 60000 draws of standard deviation 0.023: mean within 0.023 / 245 * 5, deviation within 1.5 %
    assert abs(module.weight.mean().item()) < 5e-4
    assert abs(module.weight.std().item() / 0.023 - 1) < 0.015
    assert module.eps == 1e-5
    assert module.normalization == "LayerNorm"
    zero_centered = LayerNormLinear(200, 3, zero_centered_gamma=True)
    assert torch.equal(zero_centered.layer_norm_weight, torch.zeros(200))


@pytest.mark.parametrize("kind", MODULES)
def test_params_dtype_device_and_init_method(kind: str) -> None:
    module = MODULES[kind](params_dtype=torch.bfloat16, init_method=lambda w: w.fill_(3.0))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    weights = [n for group in module.weight_groups() for n in group]
    assert all(torch.equal(getattr(module, n), torch.full((5, 6), 3.0).bfloat16()) for n in weights)
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in MODULES[kind]().parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", MODULES)
def test_a_meta_build_is_initialized_by_reset_parameters(kind: str) -> None:
    meta = MODULES[kind](device="meta")
    assert all(p.is_meta for p in meta.parameters())
    torch.manual_seed(3)
    real = meta.to_empty(device="cpu")
    real.reset_parameters()
    torch.manual_seed(3)
    direct = MODULES[kind]()
    assert [torch.equal(a, b) for a, b in zip(real.parameters(), direct.parameters(), strict=True)] == (
        [True] * len(list(direct.parameters()))
    )


@pytest.mark.parametrize("kind", MODULES)
def test_weight_groups_name_what_may_be_sharded(kind: str) -> None:
    module = MODULES[kind]()
    expected = [["weight0", "weight1"]] if kind == "GroupedLinear" else [["weight"]]
    assert module.weight_groups() == expected
    assert all(isinstance(getattr(module, n), nn.Parameter) for group in expected for n in group)


@pytest.mark.parametrize("bias", [True, False])
def test_return_bias_leaves_the_addition_to_the_caller(bias: bool) -> None:
    x = torch.randn(3, 6)
    module = Linear(6, 5, bias=bias, return_bias=True)
    y, given = module(x)
    assert given is module.bias
    assert torch.equal(y, F.linear(x, module.weight))
    grouped = GroupedLinear(2, 6, 5, bias=bias, return_bias=True)
    y, given = grouped(x, [2, 1])
    assert torch.equal(y, torch.cat([F.linear(x[:2], grouped.weight0), F.linear(x[2:], grouped.weight1)]))
    assert (given is None) if not bias else [a is b for a, b in zip(given, [grouped.bias0, grouped.bias1], strict=True)]


def test_the_norms_output_is_returned_and_takes_part_in_autograd() -> None:
    x = torch.randn(3, 6)
    module = LayerNormLinear(6, 5, return_layernorm_output=True)
    y, normed = module(x)
    assert torch.equal(normed, F.layer_norm(x, (6,)))
    assert torch.equal(y, F.linear(normed, module.weight, module.bias))
    twin = copy.deepcopy(module)
    (y.sum() + normed.square().sum()).backward()
    h = F.layer_norm(x, (6,), twin.layer_norm_weight, twin.layer_norm_bias)
    (F.linear(h, twin.weight, twin.bias).sum() + h.square().sum()).backward()
    assert torch.equal(module.layer_norm_weight.grad, twin.layer_norm_weight.grad)
    all_three = LayerNormLinear(6, 5, return_layernorm_output=True, return_bias=True)
    y, bias, normed = all_three(x)
    assert bias is all_three.bias
    assert torch.equal(y, F.linear(normed, all_three.weight))


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_norms_output_from_a_distributed_weight(kind: str, returned: bool) -> None:
    plain = LayerNormLinear(6, 5, normalization=kind, return_layernorm_output=returned)
    module = copy.deepcopy(plain)
    module.weight = exact_fake(plain.weight.detach())
    x = torch.randn(3, 6)
    for m in (plain, module):
        y = m(x)
        loss = y[0].sum() + y[1].cos().sum() if returned else y.sum()
        loss.backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert torch.equal(module.layer_norm_weight.grad, plain.layer_norm_weight.grad)
    assert module.weight.live_full_weights == 0


@pytest.mark.parametrize("kind", MODULES)
def test_copies_pickles_and_state_dicts(kind: str) -> None:
    module, x = MODULES[kind](), torch.randn(4, 6)
    wanted = run(module, x)
    assert torch.equal(run(copy.deepcopy(module), x), wanted)
    assert torch.equal(run(pickle.loads(pickle.dumps(module)), x), wanted)
    other = MODULES[kind]()
    other.load_state_dict(module.state_dict())
    assert torch.equal(run(other, x), wanted)


def test_is_first_microbatch_is_taken() -> None:
    x = torch.randn(3, 6)
    for module in (Linear(6, 5), LayerNormLinear(6, 5)):
        assert torch.equal(module(x, is_first_microbatch=True), module(x, is_first_microbatch=None))
    grouped = GroupedLinear(2, 6, 5)
    assert torch.equal(grouped(x, [1, 2], is_first_microbatch=False), grouped(x, [1, 2]))


def test_repr_says_what_it_is() -> None:
    assert repr(Linear(6, 5)) == "Linear(in_features=6, out_features=5, bias=True)"
    assert repr(GroupedLinear(2, 6, 5, bias=False)) == (
        "GroupedLinear(num_gemms=2, in_features=6, out_features=5, bias=False)"
    )
    assert "normalization=RMSNorm, eps=1e-05, zero_centered_gamma=True" in repr(
        LayerNormLinear(6, 5, normalization="RMSNorm", zero_centered_gamma=True)
    )


# --- what is refused

REFUSED = [
    ("tp_size", 2, "ColumnParallelLinear"),
    ("tp_group", object(), "ColumnParallelLinear"),
    ("parallel_mode", "column", "ColumnParallelLinear"),
    ("sequence_parallel", True, "ColumnParallelLinear"),
    ("parameters_split", ("q", "k", "v"), "one module per part"),
    ("fuse_wgrad_accumulation", True, "main_grad"),
    ("delay_wgrad_compute", True, "computed first"),
    ("get_rng_state_tracker", lambda: None, "seed it alike"),
    ("ub_overlap_ag", True, "tp_gemm_backend"),
    ("symmetric_ar_type", "two_shot", "ColumnParallelLinear"),
]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("argument, value, advice", REFUSED, ids=[r[0] for r in REFUSED])
def test_arguments_that_are_not_supported_are_refused_with_advice(
    kind: str, argument: str, value: object, advice: str
) -> None:
    name = "LayerNormLinear" if kind == "RMSNormLinear" else kind
    with pytest.raises(UnsupportedError, match=rf"{name}\({argument}=.*is not supported: .*{advice}"):
        MODULES[kind](**{argument: value})


@pytest.mark.parametrize("kind", MODULES)
def test_transformer_engines_defaults_are_accepted(kind: str) -> None:
    MODULES[kind](
        sequence_parallel=False,
        tp_group=None,
        tp_size=1,
        parallel_mode=None,
        parameters_split=None,
        fuse_wgrad_accumulation=False,
        get_rng_state_tracker=None,
        ub_overlap_ag=False,
        delay_wgrad_compute=False,
    )


@pytest.mark.parametrize("kind", MODULES)
def test_unknown_arguments_are_type_errors(kind: str) -> None:
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'biass'"):
        MODULES[kind](biass=True)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(GTPValueError, match="'LayerNorm' or 'RMSNorm', got 'GroupNorm'"):
        LayerNormLinear(6, 5, normalization="GroupNorm")
    with pytest.raises(GTPValueError, match="num_gemms must be at least 1, got 0"):
        GroupedLinear(0, 6, 5)

"""Layers that hand their weights to nobody are refused while the model is built, wherever the spec has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import gtp
from tests.megatron import hybrid
from tests.megatron.test_refusals import message
from tests.megatron.training import Case, Job, bare_models, environment, model_config


class PlainLinear(torch.nn.Linear):
    """A linear of another library, in the shape that Megatron's specs ask for."""

    def __init__(self, input_size: int, output_size: int, **options: object) -> None:
        super().__init__(input_size, output_size, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class OwnLinear(torch.nn.Module):
    """A user's own."""

    def __init__(self, input_size: int, output_size: int, **options: object) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.kernel = torch.nn.Parameter(torch.zeros(output_size, input_size))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.inner.kernel.t(), None


def adapted(input_size: int, output_size: int, **options: Any) -> torch.nn.Module:
    """Megatron's linear with an adapter beside it, small and whole, as adapters are."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = ColumnParallelLinear(input_size, output_size, **options)
            self.down = torch.nn.Linear(input_size, 2, bias=False)
            self.up = torch.nn.Linear(2, output_size, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            y, bias = self.base(x)
            return y + self.up(self.down(x)), bias

    return Adapted()


class InTheSpec:
    """Builds a model, and does no more, with another class for one linear of its spec."""

    def __init__(self, where: str, made_by: Callable[..., torch.nn.Module] = PlainLinear) -> None:
        self.where, self.made_by = where, made_by

    def __call__(self, case: Case) -> torch.nn.Module:
        from megatron.core.models.gpt import gpt_layer_specs

        def changed(*args: Any, **options: Any) -> Any:
            spec = real(*args, **options)
            holder, _, field = self.where.rpartition(".")
            found = spec
            for name in holder.split("."):
                found = found[int(name)] if name.isdigit() else getattr(found, name)
                # a spec holds what it is made of in `submodules`, a partial function among its arguments
                found = getattr(found, "keywords", {}).get("submodules", getattr(found, "submodules", found))
            setattr(found, field, self.made_by)
            return spec

        owner, function = gpt_layer_specs, "get_gpt_layer_local_spec"
        if case.hybrid is not None:
            owner, function = hybrid, "stack_spec"
        elif case.mtp:
            function = "get_gpt_mtp_block_spec"
        real = getattr(owner, function)
        with mock.patch.object(owner, function, changed):
            (model,) = bare_models(case, model_config(case))
        return model


def a_foreign_linear_put_in_later(case: Case) -> None:
    (model,) = bare_models(case, model_config(case))
    mlp = model.decoder.layers[1].mlp
    mlp.linear_fc2 = PlainLinear(*reversed(mlp.linear_fc2.weight.logical_shape))


def a_fused_mlp(case: Case) -> None:
    """As `use_te_op_fuser=True` builds it; what its forward would do does not matter."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    fused = type("TEFusedMLP", (MLP,), {})
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    InTheSpec("submodules.mlp", partial(fused.as_mlp_submodule, submodules=linears))(case)


class OfMla:
    """Builds a model whose latent attention reads weights itself, of local layers in the places of the usual one's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, case: Case) -> None:
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla

        real = gpt_layer_specs.get_gpt_layer_local_spec
        found = vars(multi_latent_attention) | vars(absorbed_mla)

        def changed(*args: Any, **options: Any) -> Any:
            spec = real(*args, **options)
            attention = spec.submodules.self_attention
            attention.module = found[self.kind]
            if self.kind == "FusedMLASelfAttention":
                attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
            else:
                usual = vars(attention.submodules)
                kind = found["AbsorbedMLASelfAttentionSubmodules"]
                attention.submodules = kind(
                    **{name: usual[name] for name in kind.__dataclass_fields__ if name in usual}
                )
            return spec

        with mock.patch.object(gpt_layer_specs, "get_gpt_layer_local_spec", changed):
            bare_models(case, model_config(case))


REFUSALS: dict[str, tuple[Case, Callable[[Case], object], str]] = {
    "fused_mlp": (
        Case(gtp=2),
        a_fused_mlp,
        r"UnsupportedError: TransformerLayer\.mlp is a TEFusedMLP: .*use_te_op_fuser=False",
    ),
    "fused_mla": (
        Case(gtp=2, mla=True),
        OfMla("FusedMLASelfAttention"),
        r"UnsupportedError: TransformerLayer\.self_attention is a FusedMLASelfAttention: its checkpoints split .*"
        r"mla_down_proj_fusion=False",
    ),
    "absorbed_mla": (
        Case(gtp=2, mla=True),
        OfMla("AbsorbedMLASelfAttention"),
        r"UnsupportedError: TransformerLayer\.self_attention is a AbsorbedMLASelfAttention: its forward reads .*"
        r"Use MLASelfAttention",
    ),
    "of_an_mlp": (
        Case(gtp=2),
        InTheSpec("submodules.mlp.linear_fc2"),
        r"UnsupportedError: MLP\.linear_fc2 is a PlainLinear, .*tensor_parallel_num_weight_shards every rank would "
        r"hold all of \(32, 40\)\. Use ColumnParallelLinear or RowParallelLinear, or .*Transformer Engine",
    ),
    "of_attention": (
        Case(gtp=2),
        InTheSpec("submodules.self_attention.linear_qkv", OwnLinear),
        r"UnsupportedError: SelfAttention\.linear_qkv is a OwnLinear, .*all of \(96, 32\)",
    ),
    "of_mla": (
        Case(gtp=2, mla=True),
        InTheSpec("submodules.self_attention.linear_kv_up_proj"),
        r"UnsupportedError: MLASelfAttention\.linear_kv_up_proj is a PlainLinear, .*all of \(64, 16\)",
    ),
    "of_experts": (
        Case(gtp=2, egtp=2, experts=4),
        InTheSpec("submodules.mlp.experts.linear_fc1"),
        r"UnsupportedError: MLP\.linear_fc1 is a PlainLinear, .*with expert_tensor_parallel_num_weight_shards .*"
        r"all of \(48, 32\)",
    ),
    "of_mtp": (
        Case(gtp=2, mtp=1),
        InTheSpec("layer_specs.0.eh_proj"),
        r"UnsupportedError: MultiTokenPredictionLayer\.eh_proj is a PlainLinear, .*all of \(32, 64\)",
    ),
    "of_mamba": (
        Case(gtp=2, hybrid="M*-"),
        InTheSpec("submodules.mamba_layer.mixer.in_proj", OwnLinear),
        r"UnsupportedError: MambaMixer\.in_proj is a OwnLinear, .*all of \(\d+, 32\)",
    ),
    "put_in_later": (
        Case(gtp=2),
        a_foreign_linear_put_in_later,
        r"UnsupportedError: MLP\.linear_fc2 is a PlainLinear, .*Use ColumnParallelLinear",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(ranks: Any, name: str):
    """C91, C92."""
    case, wrong, pattern = REFUSALS[name]
    for text in ranks(2).run(message, case, wrong):
        assert re.match(pattern, text), text


EXPERTS_ALONE = Case(ep=2, egtp=2, experts=4, shared_expert=True, steps=2)
DENSE_ALONE = Case(gtp=2, experts=4, shared_expert=True, steps=2)

OF_ONE_AXIS: dict[str, tuple[int, Case, Callable[[Case], object], str]] = {
    "of experts, on their axis": (4, EXPERTS_ALONE, InTheSpec("submodules.mlp.experts.linear_fc2"), r"\(32, 24\)"),
    "of a shared expert, on the dense axis": (
        2,
        DENSE_ALONE,
        InTheSpec("submodules.mlp.shared_experts.linear_fc1"),
        r"\(48, 32\)",
    ),
}


@pytest.mark.parametrize("name", OF_ONE_AXIS)
def test_refused_by_the_axis_that_is_there_to_shard_it(ranks: Any, name: str):
    """C91, C92."""
    size, case, wrong, shape = OF_ONE_AXIS[name]
    setting = "expert_tensor_parallel_num_weight_shards" if case.egtp > 1 else "tensor_parallel_num_weight_shards"
    for text in ranks(size).run(message, case, wrong):
        assert re.search(f" is a PlainLinear, .*: with {setting} every rank would hold all of {shape}", text), text


PASSES: dict[str, tuple[int, Case, str]] = {
    "attention's beside sharded experts": (4, EXPERTS_ALONE, "submodules.self_attention.linear_proj"),
    "a shared expert's beside sharded experts": (4, EXPERTS_ALONE, "submodules.mlp.shared_experts.linear_fc1"),
    "experts' beside dense weights": (2, DENSE_ALONE, "submodules.mlp.experts.linear_fc1"),
}


def trained_with(case: Case, where: str) -> tuple[list[float], list[float], list[str]]:
    """Losses without and with the flag of a model with a foreign linear, and what is sharded then."""
    results = []
    for each in (case.unsharded(), case):
        with environment(each):
            job = Job(each, [InTheSpec(where)(each)])
            for step in range(each.steps):
                job.step(step)
            results.append(job.result())
    plain, sharded = results
    return plain.losses, sharded.losses, sharded.sharded


@pytest.mark.parametrize("name", PASSES)
def test_what_no_axis_would_shard_trains_as_without_the_flag(ranks: Any, name: str):
    size, case, where = PASSES[name]
    for plain, losses, sharded in ranks(size).run(trained_with, case, where):
        # wgrads of the sharded weights are added in another order
        assert losses == pytest.approx(plain, rel=0, abs=2e-6)
        assert losses[1] != losses[0]
        assert any(".local_experts." in weight for weight in sharded) == (case.egtp > 1)
        assert any(".self_attention." in weight for weight in sharded) == (case.gtp > 1)


def a_linear_put_into(case: Case, expert: bool) -> str:
    """What is said to a foreign linear that a built model is given."""
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        mlp = model.decoder.layers[0].mlp
        mlp = mlp.experts.local_experts[0] if expert else mlp.shared_experts
        try:
            mlp.linear_fc2 = PlainLinear(24, 32)
        except gtp.UnsupportedError as error:
            return str(error)
    return "nothing was refused"


def test_what_is_put_in_later_is_judged_by_its_axis_too(ranks: Any):
    for pool, case in ((ranks(2), DENSE_ALONE), (ranks(4), EXPERTS_ALONE)):
        for expert in (True, False):
            for text in pool.run(a_linear_put_into, case, expert):
                assert ("is a PlainLinear" in text) == (expert == (case.egtp > 1)), text


def swapped(of_an_expert: bool) -> str:
    """What is said to a model that was built without the flag, with a foreign linear, and is sharded by dense axis."""
    case = DENSE_ALONE
    with environment(case.unsharded()):
        (model,) = bare_models(case.unsharded(), model_config(case.unsharded()))
        mlp = model.decoder.layers[0].mlp
        (mlp.experts.local_experts[0] if of_an_expert else mlp.shared_experts).linear_fc2 = PlainLinear(24, 32)
    with environment(case):
        try:
            gtp.megatron.swap_parameters(model)
        except gtp.UnsupportedError as error:
            return str(error)
    return "nothing was refused"


def test_swapped_models_are_judged_axis_by_axis(ranks: Any):
    assert ranks(2).run(swapped, True) == ["nothing was refused"] * 2
    for text in ranks(2).run(swapped, False):
        assert text.startswith("SharedExpertMLP.linear_fc2 is a PlainLinear"), text


def linears_that_pass() -> tuple[list[float], list[float], list[str]]:
    """Losses with a foreign linear and no GTP axis; with adapters and one; what is sharded then."""
    with environment(Case()):
        plain = Job(Case(), [InTheSpec("submodules.mlp.linear_fc2")(Case())])
        plain.step(0)
    case = Case(gtp=2, steps=2)
    with environment(case):
        job = Job(case, [InTheSpec("submodules.mlp.linear_fc1", adapted)(case)])
        job.step(0)
        job.step(1)
        return plain.losses, job.losses, job.result().sharded


def test_foreign_linears_pass_without_the_flag_and_adapters_pass_with_it(ranks: Any):
    for plain, losses, sharded in ranks(2).run(linears_that_pass):
        assert math.isfinite(plain[0])
        assert math.isfinite(losses[1])
        assert losses[1] != losses[0]
        assert [n for n in sharded if "linear_fc1" in n] == [
            f"decoder.layers.{i}.mlp.linear_fc1.base.weight" for i in (0, 1)
        ]


def heads_of_a_users_own() -> None:
    """No layer spec says what they are."""
    from megatron.core.transformer.module import MegatronModule

    class Head(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.value_proj = torch.nn.Linear(16, 1)
            self.patch_proj = torch.nn.Conv2d(3, 4, 2)
            self.linear_attn_bias = torch.nn.Embedding(8, 2)

    case = Case(gtp=2)
    with environment(case):
        Head(model_config(case))


def test_modules_that_no_spec_names_are_the_users_own_business(ranks: Any):
    ranks(2).run(heads_of_a_users_own)

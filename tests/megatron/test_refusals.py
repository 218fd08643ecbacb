"""Settings that cannot work together fail when the model is built, and name the setting."""

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
import gtp.megatron
from gtp.megatron.refusals import ELEMENTWISE, WHOLE_MATRIX
from gtp.testing.megatron_cpu import megatron_on_cpu
from tests.megatron import hybrid
from tests.megatron.training import Case, Job, bare_models, environment, model_config


def message(case: Case, wrong: Callable[[Case], object]) -> str:
    with environment(case):
        try:
            wrong(case)
        except Exception as error:  # noqa: BLE001  # the text is the result
            return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def averaging_in_the_collective(case: Case) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = model_config(case)
    DistributedDataParallel(
        config, DistributedDataParallelConfig(average_in_collective=True), *bare_models(case, config)
    )


def experts_sharded_over_replicas(case: Case) -> None:
    bare_models(case, model_config(case))


def shards_that_tp_does_not_divide(case: Case) -> None:
    from megatron.core.transformer import TransformerConfig

    TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
        tensor_parallel_num_weight_shards=3,
    )  # fmt: skip


def fewer_shards_than_tp(case: Case) -> None:
    from megatron.core.transformer import TransformerConfig

    TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
        tensor_parallel_num_weight_shards=1,
    )  # fmt: skip


class Setting:
    """Builds a model whose config has one field set."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def __call__(self, case: Case) -> None:
        config = model_config(case)
        setattr(config, self.name, self.value)
        bare_models(case, config)


def counting_zeros_of_padding(case: Case) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    job = Job(case)
    get_megatron_optimizer(OptimizerConfig(lr=1e-2, log_num_zeros_in_grad=True), job.chunks)


def a_weight_stored_otherwise(case: Case) -> None:
    from megatron.core.tensor_parallel import layers

    class Stored(torch.nn.Parameter):
        """As Transformer Engine's FP8 parameters are: a class of their own."""

    with mock.patch.object(layers, "Parameter", Stored):
        bare_models(case, model_config(case))


def a_layer_that_multiplies_by_hand(case: Case) -> None:
    job = Job(case)
    layer = job.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    layer.forward = lambda x: (torch.matmul(x, layer.weight.t()), None)
    job.step(0)


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


def weights_read_like_tensors(case: Case) -> None:
    job = Job(case)
    job.chunks[0].module.output_layer.weight.sum()


REFUSALS: dict[str, tuple[Case, Callable[[Case], object], str]] = {
    "average_in_collective": (
        Case(gtp=2),
        averaging_in_the_collective,
        "AssertionError: .*average_in_collective=False",
    ),
    "experts_without_ep": (
        Case(egtp=2, experts=4),
        experts_sharded_over_replicas,
        r"GTPValueError: ColumnParallelLinear\.weight: .*ranks \[0, 1\].*expert_tensor_parallel_num_weight_shards",
    ),
    "indivisible_shards": (
        Case(),
        shards_that_tp_does_not_divide,
        r"ValueError: tensor_parallel_num_weight_shards \(3\) must be divisible by tensor_model_parallel_size \(2\)",
    ),
    "fewer_shards_than_tp": (
        Case(),
        fewer_shards_than_tp,
        r"ValueError: tensor_parallel_num_weight_shards \(1\) must be .*tensor_model_parallel_size",
    ),
    "fp8": (Case(gtp=2), Setting("fp8", "hybrid"), r"UnsupportedError: fp8='hybrid' with tensor_parallel_num_weight"),
    "fp4": (Case(gtp=2), Setting("fp4", "e2m1"), "UnsupportedError: fp4='e2m1' .*Train in bf16"),
    "cuda_graphs": (
        Case(gtp=2),
        Setting("cuda_graph_impl", "local"),
        "UnsupportedError: cuda_graph_impl='local' .*does not run under Megatron's CUDA graph runner",
    ),
    "old_cuda_graphs": (Case(gtp=2), Setting("enable_cuda_graph", True), "UnsupportedError: enable_cuda_graph=True"),
    "delayed_wgrad": (
        Case(gtp=2),
        Setting("delay_wgrad_compute", True),
        "UnsupportedError: delay_wgrad_compute=True .*would never be reduced",
    ),
    "zeros_of_padding": (
        Case(gtp=2, alignment=7),
        counting_zeros_of_padding,
        r"UnsupportedError: log_num_zeros_in_grad=True: embedding\.word_embeddings\.weight has 2 rows of padding",
    ),
    "stored_otherwise": (
        Case(gtp=2),
        a_weight_stored_otherwise,
        r"UnsupportedError: VocabParallelEmbedding\.weight is a Stored: gtp shards plain parameters",
    ),
    "by_hand": (
        Case(gtp=2),
        a_layer_that_multiplies_by_hand,
        r"UnsupportedError: .*'decoder\.layers\.0\.mlp\.linear_fc1\.weight': t needs the full weight \(80, 32\)",
    ),
    "fused_mlp": (
        Case(gtp=2),
        a_fused_mlp,
        r"UnsupportedError: TransformerLayer\.mlp is a TEFusedMLP: .*use_te_op_fuser=False",
    ),
    "foreign_linear": (
        Case(gtp=2),
        InTheSpec("submodules.mlp.linear_fc2"),
        r"UnsupportedError: MLP\.linear_fc2 is a PlainLinear, .*tensor_parallel_num_weight_shards every rank would "
        r"hold all of \(32, 40\)\. Use ColumnParallelLinear or RowParallelLinear, or .*Transformer Engine",
    ),
    "foreign_linear_of_attention": (
        Case(gtp=2),
        InTheSpec("submodules.self_attention.linear_qkv", OwnLinear),
        r"UnsupportedError: SelfAttention\.linear_qkv is a OwnLinear, .*all of \(96, 32\)",
    ),
    "foreign_linear_of_mla": (
        Case(gtp=2, mla=True),
        InTheSpec("submodules.self_attention.linear_kv_up_proj"),
        r"UnsupportedError: MLASelfAttention\.linear_kv_up_proj is a PlainLinear, .*all of \(64, 16\)",
    ),
    "foreign_linear_of_experts": (
        Case(gtp=2, egtp=2, experts=4),
        InTheSpec("submodules.mlp.experts.linear_fc1"),
        r"UnsupportedError: MLP\.linear_fc1 is a PlainLinear, .*all of \(48, 32\)",
    ),
    "foreign_linear_of_mtp": (
        Case(gtp=2, mtp=1),
        InTheSpec("layer_specs.0.eh_proj"),
        r"UnsupportedError: MultiTokenPredictionLayer\.eh_proj is a PlainLinear, .*all of \(32, 64\)",
    ),
    "foreign_linear_of_mamba": (
        Case(gtp=2, hybrid="M*-"),
        InTheSpec("submodules.mamba_layer.mixer.in_proj", OwnLinear),
        r"UnsupportedError: MambaMixer\.in_proj is a OwnLinear, .*all of \(\d+, 32\)",
    ),
    "foreign_linear_put_in_later": (
        Case(gtp=2),
        a_foreign_linear_put_in_later,
        r"UnsupportedError: MLP\.linear_fc2 is a PlainLinear, .*Use ColumnParallelLinear",
    ),
    "like_a_tensor": (
        Case(gtp=2),
        weights_read_like_tensors,
        r"UnsupportedError: .*sum needs the full weight \(96, 32\).*full_tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(ranks: Any, name: str):
    """C91."""
    case, wrong, pattern = REFUSALS[name]
    for text in ranks(2).run(message, case, wrong):
        assert re.match(pattern, text), text


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


def optimizers_made(names: list[str]) -> dict[str, str]:
    case = Case(gtp=2)
    with environment(case):
        job = Job(case)
        return {name: message_of(job, name) for name in names}


def message_of(job: Job, name: str) -> str:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    try:
        get_megatron_optimizer(OptimizerConfig(optimizer=name, lr=1e-2, muon_fp32_matmul_prec="highest"), job.chunks)
    except gtp.GTPError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def test_optimizers_that_look_at_the_matrix_are_refused_by_name(ranks: Any):
    pytest.importorskip(
        "emerging_optimizers", reason="Megatron registers optimizers of the package emerging-optimizers"
    )
    from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS

    served = ELEMENTWISE | WHOLE_MATRIX
    names = sorted({"adam", "sgd", *_EMERGING_OPTIMIZERS})
    assert {"soap", "adaptive_muon"} | served <= {*names}
    for found in ranks(2).run(optimizers_made, names):
        assert {name for name, text in found.items() if text == "made"} == {"adam", "sgd"} | served
        for name, text in found.items():
            if text != "made":
                assert re.match(
                    rf"UnsupportedError: optimizer='{name}': .*'adam', 'laprop', 'lion', 'muon', 'sgd'", text
                )


def zeros_counted() -> list[float]:
    counts = []
    for case in (Case(), Case(gtp=2), Case(gtp=2, distributed_optimizer=True)):
        with environment(case):
            job = Job(case)
            job.step(0)
            counts.append(job.optimizer.count_zeros())
    return counts


def test_zeros_are_those_of_the_unsharded_gradient(ranks: Any):
    for plain, sharded, distributed in ranks(2).run(zeros_counted):
        assert plain == sharded == distributed
        assert plain >= 32  # rows of tokens that did not occur


def more_ranks_than_there_are() -> str:
    from megatron.core import parallel_state

    with megatron_on_cpu():
        try:
            parallel_state.initialize_model_parallel(gtp_remat_size=3)
        except RuntimeError as error:
            return str(error)
    return "nothing was refused"


def test_a_gtp_axis_longer_than_the_world_is_refused(ranks: Any):
    """C91."""
    assert all("world_size (2) is not divisible by" in text for text in ranks(2).run(more_ranks_than_there_are))


def optimizer_instances() -> str:
    from megatron.core import parallel_state

    with megatron_on_cpu():
        try:
            parallel_state.initialize_model_parallel(gtp_remat_size=2, num_distributed_optimizer_instances=2)
        except AssertionError as error:
            return str(error)
    return "nothing was refused"


def test_several_optimizer_instances_are_refused(ranks: Any):
    assert all("num_distributed_optimizer_instances > 1" in text for text in ranks(2).run(optimizer_instances))


def test_the_cpu_context_is_not_for_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(gtp.GTPStateError, match=r"2 GPU.*CUDA_VISIBLE_DEVICES"), megatron_on_cpu():
        pass


def test_the_cpu_context_leaves_nothing_behind():
    before = dict(vars(torch.cuda))
    with megatron_on_cpu():
        assert torch.ones(1, device="cuda").device.type == "cpu"
        assert torch.cuda.current_device() == torch.device("cpu")
    assert {k: v for k, v in vars(torch.cuda).items() if k in before} == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")

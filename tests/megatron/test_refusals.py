"""Settings that cannot work together fail when the model is built, and name the setting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import gtp
import gtp.megatron
from gtp.megatron.refusals import ELEMENTWISE, WHOLE_MATRIX
from gtp.testing.megatron_cpu import megatron_on_cpu
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


def sharded_once_more_by_megatron(case: Case) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel

    config = model_config(case)
    ddp = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params")
    FullyShardedDataParallel(config, ddp, *bare_models(case, config))


def sharded_once_more_by_torch(case: Case) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

    config = model_config(case)
    TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), module=bare_models(case, config)[0])


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


def copied_into_another_layout(case: Case) -> None:
    from megatron.core.resharding import build_local_reshard_plan

    (source,) = bare_models(case, model_config(case))
    (target,) = bare_models(case, model_config(dataclasses.replace(case, hidden=16)))
    build_local_reshard_plan(source, target)


class Asking:
    """Builds a model whose config asks for other axes than are up."""

    def __init__(self, **axes: int) -> None:
        self.axes = axes

    def __call__(self, case: Case) -> None:
        bare_models(case, model_config(dataclasses.replace(case, **self.axes)))


def a_setting_after_the_model_is_built(case: Case) -> None:
    job = Job(case)
    job.config.delay_wgrad_compute = True
    job.step(0)


def one_file_for_two_shards(case: Case) -> None:
    Job(case).optimizer.save_parameter_state("optimizer.pt")


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


def built_on_the_meta_device(case: Case) -> None:
    with torch.device("meta"), mock.patch.object(torch.cuda, "current_device", return_value=torch.device("meta")):
        bare_models(case, model_config(case))


def a_layer_that_multiplies_by_hand(case: Case) -> None:
    job = Job(case)
    layer = job.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    layer.forward = lambda x: (torch.matmul(x, layer.weight.t()), None)
    job.step(0)


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
    "resharding": (
        Case(gtp=2, layers=1),
        copied_into_another_layout,
        r"UnsupportedError: swap_model_weights of megatron\.core\.resharding: .*megatron\.core\.dist_checkpointing",
    ),
    "no_axis": (
        Case(layers=1),
        Asking(gtp=2),
        r"GTPStateError: tensor_parallel_num_weight_shards=2 asks for a GTP axis of 2 ranks, and there is one of 1, .*"
        r"initialize_model_parallel\(gtp_remat_size=2\)",
    ),
    "a_shorter_axis": (
        Case(gtp=2, layers=1),
        Asking(gtp=4),
        "GTPStateError: tensor_parallel_num_weight_shards=4 asks for a GTP axis of 4 ranks, and there is one of 2",
    ),
    "no_axis_for_experts": (
        Case(gtp=2, experts=2, layers=1),
        Asking(egtp=2),
        r"GTPStateError: expert_tensor_parallel_num_weight_shards=2 .*\(expert_gtp_remat_size=2\)",
    ),
    "set_later": (
        Case(gtp=2, layers=1),
        a_setting_after_the_model_is_built,
        "UnsupportedError: delay_wgrad_compute=True .*would never be reduced",
    ),
    "one_file_for_two_shards": (
        Case(gtp=2, layers=1, distributed_optimizer=True),
        one_file_for_two_shards,
        r"UnsupportedError: save_parameter_state\('optimizer\.pt'\): ranks \[0, 1\] hold the state of different shards",
    ),
    "one_file_for_two_shards_and_experts": (
        Case(gtp=2, ep=2, experts=2, layers=1, distributed_optimizer=True),
        one_file_for_two_shards,
        r"UnsupportedError: save_parameter_state\('optimizer\.pt'\): .*--ckpt-format torch_dist",
    ),
    "deferred_wgrad": (
        Case(gtp=2),
        Setting("defer_embedding_wgrad_compute", True),
        "UnsupportedError: defer_embedding_wgrad_compute=True .*would never be reduced",
    ),
    "quantized_layer_by_layer": (
        Case(gtp=2),
        Setting("quant_recipe", "a recipe"),
        "UnsupportedError: quant_recipe='a recipe' .*Train in bf16",
    ),
    "stacked_experts": (
        Case(gtp=2),
        Setting("moe_single_grouped_weight", True),
        "UnsupportedError: moe_single_grouped_weight=True .*one tensor of what gtp shards expert by expert",
    ),
    "stacked_biases": (
        Case(gtp=2),
        Setting("moe_single_grouped_bias", True),
        "UnsupportedError: moe_single_grouped_bias=True .*Turn it off",
    ),
    "megatron_fsdp": (
        Case(gtp=2),
        sharded_once_more_by_megatron,
        r"UnsupportedError: FullyShardedDataParallel of Megatron: embedding\.word_embeddings\.weight is sharded by .*"
        r"Use DistributedDataParallel",
    ),
    "torch_fsdp": (
        Case(gtp=2),
        sharded_once_more_by_torch,
        r"UnsupportedError: TorchFullyShardedDataParallel of Megatron: .* would be sharded once more",
    ),
    "qk_clip": (Case(gtp=2), Setting("qk_clip", True), "UnsupportedError: qk_clip=True .*of which a rank stores rows"),
    "meta_device": (
        Case(gtp=2, cpu_init=False),
        built_on_the_meta_device,
        r"UnsupportedError: VocabParallelEmbedding\.weight is on the meta device.*init_model_with_meta_device off",
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


def counting_zeros_of_padding_by_muon() -> str:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def make(case: Case) -> None:
        options = OptimizerConfig(
            optimizer="muon", lr=1e-2, muon_fp32_matmul_prec="highest", log_num_zeros_in_grad=True
        )
        get_megatron_optimizer(options, Job(case).chunks)

    return message(Case(gtp=2, alignment=3), make)  # the embedding, which Adam updates, has no padding then


def test_zeros_of_padding_are_not_counted_by_emerging_optimizers_either(ranks: Any):
    pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs the package emerging-optimizers")
    for text in ranks(2).run(counting_zeros_of_padding_by_muon):
        assert re.match(
            r"UnsupportedError: log_num_zeros_in_grad=True: decoder\.layers\.0\.self_attention\.linear_proj\.weight",
            text,
        ), text


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


def test_the_cpu_context_makes_and_moves_everything_on_the_cpu():
    """Also where compilers look functions of torch up, and where a device is a context."""
    cuda = torch.device("cuda")
    with megatron_on_cpu():
        x = torch.ones(2, device="cuda")
        made = [
            x,
            x.to("cuda"),
            x.to(device=cuda),
            x.to(cuda, torch.float64),
            x.cuda(),
            x.new_zeros(3, device="cuda:0"),
        ]
        made += [torch.empty_like(x, device=cuda), torch.tensor([1.0], device="cuda"), torch.randn(2, pin_memory=True)]
        made += torch.nn.Linear(2, 2, device="cuda").cuda().to("cuda").parameters()
        assert {t.device.type for t in made} == {"cpu"}
        assert not any(t.is_pinned() for t in made)
        assert x.to(torch.float64).dtype == torch.float64
        assert torch.nn.Parameter(x).type() == "torch.cuda.FloatTensor"
        assert x.type(torch.float64).dtype == torch.float64
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"
    assert (
        torch.compile(lambda t: torch.zeros_like(t) + t.to(torch.float64), backend="eager", fullgraph=True)(x).sum()
        == 2
    )


class Asked(torch.Tensor):
    """Knows what it was asked, by function."""

    functions: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args[0].functions.append(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_the_cpu_context_asks_subclasses_for_functions_by_their_names():
    x = torch.ones(2).as_subclass(Asked)
    x.functions = []
    with megatron_on_cpu():
        x.to(torch.cuda.current_device())
        assert x.type() == "torch.cuda.FloatTensor"
        x.new_zeros(1, device="cuda")
        torch.empty_like(x, device="cuda")
        assert x.functions == [
            torch.Tensor.to,
            torch.Tensor.type,
            torch.Tensor.new_zeros,
            torch._C._VariableFunctions.empty_like,
        ]
    assert [f.__name__ for f in x.functions] == ["to", "type", "new_zeros", "empty_like"]


def sharded_model_moved(case: Case) -> tuple[bool, bool, set[str]]:
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        before = list(model.parameters())
        model.to(torch.cuda.current_device())
        moved = all(p is q for p, q in zip(before, model.cuda().parameters(), strict=True))
        return moved, any(isinstance(p, gtp.megatron.MegatronGTPWeight) for p in before), {p.type() for p in before}


def test_sharded_models_move_to_the_device_that_megatron_names(ranks: Any):
    assert ranks(2).run(sharded_model_moved, Case(gtp=2)) == [(True, True, {"torch.cuda.FloatTensor"})] * 2


def test_the_cpu_context_leaves_nothing_behind():
    owners = (torch, torch.Tensor, torch.cuda, torch.distributed)
    before = [dict(vars(owner)) for owner in owners]
    with megatron_on_cpu():
        assert torch.ones(1, device="cuda").device.type == "cpu"
        assert torch.cuda.current_device() == torch.device("cpu")
    for owner, names in zip(owners, before, strict=True):
        assert {k: v for k, v in vars(owner).items() if k in names or owner is torch.Tensor} == names
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")

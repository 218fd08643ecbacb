"""Settings that cannot work together fail when the model is built, and name the setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import gtp
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


def shards_that_tp_does_not_divide(case: Case) -> None:
    from megatron.core.transformer import TransformerConfig

    TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
        tensor_parallel_num_weight_shards=3,
    )  # fmt: skip


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
    case, wrong, pattern = REFUSALS[name]
    for text in ranks(2).run(message, case, wrong):
        assert re.match(pattern, text), text


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

"""`swap_parameters`: a model that was built without the flag, sharded afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gtp
import gtp.megatron
from gtp.testing import ranks as inside
from gtp.testing.megatron_cpu import megatron_on_cpu
from tests.megatron.training import Case, Job, bare_models, environment, initialize, model_config, train


def plain_model(case: Case, seed: int) -> torch.nn.Module:
    """Built with no GTP axis up, as by somebody who never heard of gtp."""
    from megatron.core import parallel_state

    with megatron_on_cpu():
        initialize(case.unsharded())
        torch.manual_seed(seed)
        (model,) = bare_models(case, model_config(case.unsharded()))
        parallel_state.destroy_model_parallel()
    return model


def full_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() if isinstance(p, gtp.GTPWeight) else p.detach() for n, p in model.named_parameters()}


def swapped_training(case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """Training of a swapped model, of the same model built with the flag, and facts about the swap."""
    # ranks disagree before; rank 0 holds what a model built with the flag starts from
    model = plain_model(case, seed=7 + inside.rank())
    before = {name: value.clone() for name, value in full_values(model).items()}
    for tensor in before.values():
        dist.broadcast(tensor, 0)
    model.decoder.layers[0].mlp.register_buffer("seen", torch.tensor([3 + inside.rank()]))
    objects = [id(p) for p in model.parameters()]
    with environment(case):
        runtime = gtp.megatron.swap_parameters(model)
        after = full_values(model)
        facts = {
            "same objects": objects == [id(p) for p in model.parameters()],
            "same values": all(torch.equal(before[name], after[name]) for name in before),
            "buffer": model.decoder.layers[0].mlp.seen.item(),
            "runtime": gtp.megatron.runtime_of(model) is runtime,
            "flag": (model.config.tensor_parallel_num_weight_shards, model.config.gtp_weight_remat_size),
        }
        job = Job(case, [model])
        for step in range(case.steps):
            job.step(step)
        swapped = job.result()
    return swapped, train(case), facts


@pytest.mark.parametrize("case", [Case(gtp=2, bias=True), Case(gtp=2, tied=True)], ids=["untied", "tied"])
def test_a_swapped_model_trains_like_one_built_with_the_flag(ranks: Any, case: Case):
    """C33: the values of rank 0 reach all; C11: a tied weight stays one parameter."""
    for swapped, built, facts in ranks(2).run(swapped_training, case):
        assert facts == {"same objects": True, "same values": True, "buffer": 3, "runtime": True, "flag": (2, 2)}
        assert swapped.sharded == built.sharded
        assert swapped.losses == built.losses
        assert swapped.norms == built.norms


def refused(wrong: Callable[[], object]) -> str:
    try:
        wrong()
    except gtp.GTPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals() -> list[str]:
    case = Case(gtp=2)
    model = plain_model(case, seed=7)
    found = [refused(lambda: gtp.megatron.swap_parameters(model))]
    with environment(case.unsharded()):
        found.append(refused(lambda: gtp.megatron.swap_parameters(model)))
    with environment(case):
        found.append(refused(lambda: gtp.megatron.swap_parameters(torch.nn.Linear(2, 2))))
        found.append(refused(lambda: gtp.megatron.runtime_of(model)))
        gtp.megatron.swap_parameters(model)
        found.append(refused(lambda: gtp.megatron.swap_parameters(model)))
    wrapped = plain_model(case, seed=7)
    with environment(case.unsharded()):
        Job(case.unsharded(), [wrapped])
    with environment(case):
        found.append(refused(lambda: gtp.megatron.swap_parameters(wrapped)))
    foreign = plain_model(case, seed=7)
    foreign.decoder.layers[1].mlp.linear_fc2 = torch.nn.Linear(40, 32)
    with environment(case):
        found.append(refused(lambda: gtp.megatron.swap_parameters(foreign)))
    assert not any(isinstance(p, gtp.GTPWeight) for p in foreign.parameters())
    # nothing was half done
    assert not any(isinstance(p, gtp.GTPWeight) for p in wrapped.parameters())
    return found


def test_refusals(ranks: Any):
    """C90: nothing to shard. C91: swapped twice, wrapped already."""
    expected = [
        "GTPStateError: swap_parameters needs gtp.megatron.install",
        "GTPStateError: .*no GTP axis is up",
        "GTPStateError: .*Linear holds no ColumnParallelLinear",
        "GTPStateError: GPTModel has no weight that gtp shards: was gtp.megatron.install",
        "GTPStateError: embedding.word_embeddings.weight is sharded already: swap a model once",
        "GTPStateError: embedding.word_embeddings.weight has a gradient buffer of DistributedDataParallel",
        r"UnsupportedError: MLP\.linear_fc2 is a Linear, which asks nobody to shard its weight",
    ]
    for messages in ranks(2).run(refusals):
        assert len(messages) == len(expected)
        for message, pattern in zip(messages, expected, strict=True):
            assert re.match(pattern, message), message

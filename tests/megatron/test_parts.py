"""Models whose parts are called and which never are themselves: what is done when a model is complete is done all the
same, and weights are gathered when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.megatron import training
from tests.megatron.models import SEQ
from tests.megatron.test_parity import NORM, ORDER
from tests.megatron.training import Case, Job, Trained, environment

# a gradient of an expert is to be scaled by two
EXPERTS = Case(ep=2, egtp=2, experts=4, layers=1, tied=True, microbatches=2, steps=3)


def trained(case: Case, forward: Callable[[Job], None]) -> tuple[Trained, Trained]:
    """Without the flag and with it."""
    results = []
    for each in (case.unsharded(), case):
        with environment(each):
            job = Job(each)
            forward(job)
            for step in range(each.steps):
                job.step(step)
            results.append(job.result())
    return results[0], results[1]


def past_the_model(job: Job) -> None:
    model = job.chunks[0].module
    job.chunks[0].forward = partial(type(model).forward, model)


def check(plain: Trained, sharded: Trained) -> None:
    assert sharded.losses == pytest.approx(plain.losses, rel=0, abs=ORDER)
    assert sharded.norms == pytest.approx(plain.norms, rel=NORM)
    assert sharded.losses[-1] != sharded.losses[0]
    assert "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight" in sharded.sharded


@pytest.mark.parametrize("gtp", [1, 4])
def test_a_model_whose_own_call_is_bypassed(ranks: Any, gtp: int):
    case = Case(**{**vars(EXPERTS), "gtp": gtp})
    for plain, sharded in ranks(4).run(trained, case, past_the_model):
        check(plain, sharded)


def _scheduled(case: Case, data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """As training's own; Megatron asks for a plan of the forward, whose parts it calls itself."""
    batch = next(data)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand_as(tokens)
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    weight = (labels % 5 != 0).float()
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(tokens, positions, mask, labels=labels, loss_mask=weight)
    return output, partial(training._loss, case, weight)


def overlapped(case: Case) -> tuple[Trained, Trained]:
    def before(job: Job) -> None:
        job.config.overlap_moe_expert_parallel_comm = True

    with (
        mock.patch.object(training, "_forward_step", _scheduled),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),  # noqa: PT008  # a method
    ):
        return trained(case, before)


def test_tokens_that_travel_beside_the_backward_of_another_microbatch(ranks: Any):
    """`overlap_moe_expert_parallel_comm`: backward comes layer by layer, between the layers of a forward. C46."""
    case = Case(**{**vars(EXPERTS), "bf16": True, "grad_fp32": True})
    for plain, sharded in ranks(4).run(overlapped, case):
        check(plain, sharded)

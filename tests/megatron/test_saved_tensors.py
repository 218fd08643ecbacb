"""Saved-tensor hooks around a model: activations go elsewhere until backward, weights stay what they are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.megatron.api import names_behind_the_flag
from tests.megatron.models import SEQ, VOCAB
from tests.megatron.test_parity import NORM, ORDER
from tests.megatron.training import Case, Job, Trained, bare_models, environment, model_config

CASES = {
    "dense": (2, Case(gtp=2, steps=3)),
    "biases, tied, MTP": (2, Case(gtp=2, bias=True, tied=True, mtp=1, layers=1, steps=3)),
    "tensor and sequence parallel": (4, Case(gtp=2, tp=2, sequence_parallel=True, steps=3)),
    "recomputed": (2, Case(gtp=2, recompute="full", microbatches=2, steps=3)),
    "experts": (4, Case(gtp=2, ep=2, egtp=2, experts=4, layers=1, steps=3)),
}


def trained(case: Case, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> Trained:
    """Each forward runs within `around()`. `extra` is where the shards lie."""
    with environment(case):
        job = Job(case)
        for chunk in job.chunks:
            chunk.forward = partial(within, around, chunk.forward)
        for step in range(case.steps):
            job.step(step)
        shards = [p.shard for p in job.chunks[0].parameters() if isinstance(p, gtp.GTPWeight)]
        return job.result({shard.untyped_storage().data_ptr() for shard in shards})


def within(around: Callable[[], contextlib.AbstractContextManager[Any]], forward: Any, *args: Any, **kw: Any) -> Any:
    with around():
        return forward(*args, **kw)


def offloaded(case: Case) -> tuple[Trained, Trained, set[int], set[tuple[int, ...]]]:
    """Without hooks and with them; where what they moved lay; shapes of whole weights among it."""
    moved: list[tuple[int, tuple[int, ...]]] = []

    def away(tensor: torch.Tensor) -> torch.Tensor:
        moved.append((tensor.untyped_storage().data_ptr(), tuple(tensor.shape)))
        return tensor.clone()

    def hooks() -> Any:
        return saved_tensors_hooks(away, lambda held: held.clone())

    plain, found = trained(case, contextlib.nullcontext), trained(case, hooks)
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        shapes = {tuple(p.logical_shape) for p in model.parameters() if isinstance(p, gtp.GTPWeight)}
    return plain, found, {place for place, _ in moved}, shapes & {shape for _, shape in moved}


@pytest.mark.parametrize("name", CASES)
def test_hooks_move_activations_and_change_no_number(ranks: Any, name: str):
    size, case = CASES[name]
    for plain, found, moved, weights in ranks(size).run(offloaded, case):
        # a product adds in an order that depends on where in memory its operands lie
        assert found.losses == pytest.approx(plain.losses, rel=0, abs=ORDER)
        assert found.norms == pytest.approx(plain.norms, rel=NORM)
        assert found.losses[-1] != found.losses[0]
        assert len(moved) > 5
        assert found.extra
        assert moved & found.extra == set()
        if not case.experts:  # which may get as many tokens as a weight has rows
            assert weights == set()


def offloaded_on_cpu(case: Case) -> tuple[list[float], list[float]]:
    return trained(case.unsharded(), save_on_cpu).losses, trained(case, save_on_cpu).losses


def test_activations_on_the_cpu_give_the_losses_without_the_flag(ranks: Any):
    for plain, losses in ranks(2).run(offloaded_on_cpu, Case(gtp=2)):
        assert losses == pytest.approx(plain, rel=0, abs=ORDER)
        assert losses[-1] != losses[0]


def checkpointed(case: Case) -> tuple[list[float], list[float]]:
    """torch's own checkpointing around each layer, which works by such hooks."""
    results = []
    for each in (case.unsharded(), case):
        with environment(each):
            job = Job(each)
            for layer in job.chunks[0].module.decoder.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            for step in range(each.steps):
                job.step(step)
            results.append(job.losses)
    return results[0], results[1]


def test_torchs_non_reentrant_checkpointing(ranks: Any):
    """C44."""
    for plain, losses in ranks(2).run(checkpointed, Case(gtp=2, microbatches=2)):
        # ranks' gradients are added before those of micro-batches
        assert losses == pytest.approx(plain, rel=0, abs=ORDER)
        assert losses[-1] != losses[0]


def changed_between() -> str:
    case = Case(gtp=2)
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        ids = torch.arange(SEQ).remainder(VOCAB)[None]
        with save_on_cpu():
            loss = model(ids, ids, torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)).sum()
        with torch.no_grad():
            model.decoder.layers[1].mlp.linear_fc2.weight.mul_(3)
        with pytest.raises(gtp.GTPStateError) as error:
            loss.backward()
    return str(error.value)


def test_a_weight_that_changes_before_backward_is_refused(ranks: Any):
    for text in ranks(2).run(changed_between):
        assert re.search(r"layers\.1\.mlp\.linear_fc2\.weight.* was changed in place between its forward and", text)


class Presharded(torch.nn.Module):
    """A linear as Megatron hands it over from Transformer Engine: built at shard size."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def presharded() -> tuple[str, float, str]:
    """What is said inside of hooks; what comes out where nothing is saved; what is said to a config."""
    from megatron.core import parallel_state

    case = Case(gtp=2, cpu_init=False)
    with environment(case):
        attach = names_behind_the_flag(gtp.GTPConfig())["attach_gtp_to_presharded_module"]
        group = parallel_state.get_gtp_weight_remat_group()
        layer = Presharded(model_config(case))
        attach(layer, group, 0)
        with save_on_cpu(), pytest.raises(gtp.UnsupportedError) as inside:
            layer(torch.ones(1, 3))
        with save_on_cpu(), torch.no_grad():
            total = float(layer(torch.ones(1, 3)).sum())
        offloading = model_config(case)
        offloading.cpu_offloading = True
        with pytest.raises(gtp.UnsupportedError) as built:
            attach(Presharded(offloading), group, 0)
    return str(inside.value), total, str(built.value)


def test_hooks_around_transformer_engines_linears_are_refused(ranks: Any):
    for inside, total, built in ranks(2).run(presharded):
        assert re.match(r"Presharded was called inside saved-tensor hooks .*save_on_cpu.* local layer spec", inside)
        assert total == 8 * 3
        assert re.match(r"cpu_offloading=True with tensor_parallel_num_weight_shards: Presharded saves", built)

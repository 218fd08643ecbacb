"""How many full weights are in memory, and how often each is gathered, in Megatron's models."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import gtp.megatron
from gtp.megatron import frozen as frozen_linears
from gtp.runtime.process_group import ProcessGroupTransport
from gtp.testing.memory import live_full_storages, saved_tensors
from tests.megatron.test_parity import ORDER
from tests.megatron.training import SEQ, VOCAB, Case, Job, bare_models, environment, model_config
from tests.weights.side_by_side import settled


def held_by_steps() -> tuple[int, int, int, int]:
    """Storages as large as the embedding: of a new model, after 3 steps, after 12, after the runtime's release."""

    def count() -> int:
        return len(live_full_storages(4 * VOCAB * 32))

    case = Case(gtp=2, mtp=2, tied=True)
    with environment(case):
        job = Job(case)
        new = count()
        for step in range(3):
            job.step(step)
        third = count()
        for step in range(3, 12):
            job.step(step)
        twelfth = settled(count, lambda found: found <= third)
        gtp.megatron.runtime_of(job.chunks[0]).release()
        return new, third, twelfth, settled(count, lambda found: found <= new)


def test_a_weight_used_several_times_takes_no_more_memory_with_every_step(ranks: Any):
    """C04: the embedding, which MTP's layers and both output layers use again."""
    for new, third, twelfth, released in ranks(2).run(held_by_steps):
        assert new < third
        assert twelfth <= third
        assert released == new


def full_weights_after_forward(layers: int, frozen: bool) -> int:
    case = Case(gtp=2, layers=layers, alignment=7)
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        weights = [p for p in model.parameters() if isinstance(p, gtp.megatron.MegatronGTPWeight)]
        shapes = {tuple(p.logical_shape) for p in weights}
        for p in weights[1:-1] if frozen else []:
            p.requires_grad_(False)
        ids = torch.arange(SEQ).remainder(VOCAB)[None]
        mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)

        def count() -> int:
            return sum(not shapes.isdisjoint(storage.shapes) for storage in live_full_storages(1))

        for _ in range(2):
            model(ids, ids, mask).sum().backward()
        with saved_tensors():
            loss = model(ids, ids, mask).sum()
            found = count()
        # no backward: what these hooks give back is not a weight any more
        del loss
        return found


def of_two_depths(frozen: bool) -> tuple[int, int]:
    return full_weights_after_forward(3, frozen), full_weights_after_forward(6, frozen)


@pytest.mark.parametrize("frozen", [False, True])
def test_no_full_weight_waits_for_backward(ranks: Any, frozen: bool):
    """C05, C60: at the end of forward none is held, however deep the model, by autograd or by anybody else."""
    for three, six in ranks(2).run(of_two_depths, frozen):
        assert three == six == 0


def test_frozen_weights_of_megatrons_own_linear_would_wait(ranks: Any):
    """What the test above would see."""
    for three, six in ranks(2).run(of_two_depths_by_megatron):
        assert six - three == 3 * 4


def of_two_depths_by_megatron() -> tuple[int, int]:
    with mock.patch.dict(
        frozen_linears.__dict__, {"WRAPPERS": {"linear_with_frozen_weight": lambda real: wraps(real)}}
    ):
        return of_two_depths(True)


def wraps(real: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function as it is."""
    return functools.wraps(real)(lambda *args, **options: real(*args, **options))


def frozen_training(case: Case) -> tuple[list[float], list[str], list[str]]:
    """Losses; frozen weights that changed; trainable ones that did not. The first layer and one linear are frozen."""
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        named = {name: p for name, p in model.named_parameters() if p.dim() > 1}
        for name, p in named.items():
            p.requires_grad_(".layers.0." not in name and "layers.1.mlp.linear_fc2" not in name)
        start = {name: p.detach().clone() for name, p in named.items()}
        job = Job(case, [model])
        for step in range(case.steps):
            job.step(step)
        same = {name: torch.equal(p.detach(), start[name]) for name, p in named.items()}
        frozen = [name for name, p in named.items() if not p.requires_grad]
        changed = [name for name in frozen if not same[name]]
        return job.losses, changed, [name for name in named if name not in frozen and same[name]]


def both_frozen(case: Case) -> tuple[Any, Any]:
    return frozen_training(case.unsharded()), frozen_training(case)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_a_half_frozen_model_trains_as_without_gtp(ranks: Any, options: dict[str, Any]):
    """C59, C60: the gradient passes through frozen layers to trainable ones before them."""
    case = Case(gtp=2, layers=3, **options)
    for (plain, *_), (losses, changed, unchanged) in ranks(2 * case.tp).run(both_frozen, case):
        # norms' gradients are added over TP ranks, too, with sequence parallelism
        bound = ORDER if case.sequence_parallel else 0.0
        assert max(abs(a - b) for a, b in zip(plain, losses, strict=True)) <= bound
        assert losses[-1] != losses[0]
        assert (changed, unchanged) == ([], [])


def frozen_and_changed() -> None:
    """An adapter that is merged, say, while a micro-batch is under way."""
    case = Case(gtp=2)
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        frozen = next(p for name, p in model.named_parameters() if name.endswith("layers.1.mlp.linear_fc2.weight"))
        frozen.requires_grad_(False)
        ids = torch.arange(SEQ).remainder(VOCAB)[None]
        loss = model(ids, ids, torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)).sum()
        with torch.no_grad():
            frozen.mul_(3)
        with pytest.raises(gtp.GTPStateError, match=r"linear_fc2.*was changed in place between its forward and this"):
            loss.backward()


def test_a_frozen_weight_that_changes_before_backward_is_refused(ranks: Any):
    ranks(2).run(frozen_and_changed)


def gathers_by_step(recompute: str | None) -> list[dict[str, int]]:
    """How often each weight is gathered, step by step."""
    case = Case(gtp=2, layers=3, recompute=recompute)
    steps: list[collections.Counter[str]] = []
    start = ProcessGroupTransport.start_gather

    def gather(transport: Any, group: Any, *args: Any) -> Any:
        steps[-1][group.name] += 1
        return start(transport, group, *args)

    with environment(case), mock.patch.object(ProcessGroupTransport, "start_gather", gather):
        job = Job(case)
        for step in range(5):
            steps.append(collections.Counter())
            job.step(step)
    return [dict(step) for step in steps[1:]]


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_recomputed_forward_gathers_no_more_than_once_again(ranks: Any, recompute: str | None):
    """C44: a gather in forward, one in backward, and one more at most where the forward is computed again."""
    for steps in ranks(2).run(gathers_by_step, recompute):
        assert steps == [steps[0]] * 4
        in_layers = {count for name, count in steps[0].items() if ".layers." in name}
        assert max(in_layers) <= (3 if recompute else 2)

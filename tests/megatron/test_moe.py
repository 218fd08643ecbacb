"""Mixtures of experts: which weight lies on which axis, and every gradient against Megatron's own.

Losses in all layouts are in test_parity.py; when experts are gathered is in test_experts.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gtp.megatron
from gtp.megatron import MegatronGTPWeight, building
from gtp.runtime.process_group import gather_now
from gtp.runtime.residency import Gatherer
from gtp.testing.memory import poisoned_memory
from tests.megatron.training import Case, Job, bare_models, environment, model_config, train

MOE = Case(experts=4, shared_expert=True, alignment=16)
LAYOUTS = {
    "ep2 egtp2": dataclasses.replace(MOE, ep=2, egtp=2),
    "ep2 egtp2 gtp2": dataclasses.replace(MOE, ep=2, egtp=2, gtp=2),
    "ep2 gtp4": dataclasses.replace(MOE, ep=2, gtp=4),
    "ep4 gtp2": dataclasses.replace(MOE, ep=4, gtp=2),
    "ep2 egtp2 gtp2 recompute": dataclasses.replace(MOE, ep=2, egtp=2, gtp=2, recompute="full"),
    "starved": dataclasses.replace(MOE, ep=2, egtp=2, gtp=2, microbatches=2),
    "starved on one axis": dataclasses.replace(MOE, egtp=2, gtp=2, microbatches=2),
}


@contextmanager
def all_tokens_to_two_experts() -> Iterator[None]:
    """The router sends every token to experts 0 and 1."""
    from megatron.core.transformer.moe.router import TopKRouter

    def routing(router: Any, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.view(-1, logits.shape[-1])
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        chosen[:, :2] = True
        return torch.softmax(logits, -1) * chosen, chosen

    with mock.patch.object(TopKRouter, "routing", routing):
        yield


def gradients(case: Case, starved: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The reduced gradient of every parameter after one step, whole over the GTP axes; and the expert rank."""
    with environment(case), all_tokens_to_two_experts() if starved else nullcontext(), poisoned_memory():
        job = Job(case)
        job.step(0, update=False)
        found = {}
        for name, p in job.chunks[0].module.named_parameters():
            grad = p.main_grad.detach().clone()
            if isinstance(p, MegatronGTPWeight):
                shard = grad.view(p.layout.shard_shape)
                assert not shard[p.layout.valid_rows :].any(), f"{name}: padding has a gradient"
                grad = gather_now(shard, p.group)[: p.layout.rows]
            found[name] = grad
        return found, job.parallel.get_expert_model_parallel_rank()


def compared() -> dict[str, Any]:
    """Per layout: parameters in order; those whose gradients are further from Megatron's than additions in another
    order go; those without any gradient."""
    results = {}
    references: dict[tuple[Case, bool], dict[str, torch.Tensor]] = {}
    for name, case in LAYOUTS.items():
        starved = name.startswith("starved")
        # that recomputing changes no number is test_parity's
        reference = dataclasses.replace(case.unsharded(), recompute=None), starved
        if reference not in references:
            references[reference], _ = gradients(*reference)
        plain, (sharded, expert_rank) = references[reference], gradients(case, starved)
        # sums over 4 ranks x 32 tokens, in another order: 16 units in the last place of the largest value
        distances = {key: float((plain[key] - sharded[key]).abs().max() / plain[key].abs().max()) for key in plain}
        results[name] = {
            "same names": list(plain) == list(sharded),
            "off": [key for key, distance in distances.items() if distance > 16 * 2**-24],
            "without": [key for key in sharded if not sharded[key].any()],
            "without in Megatron": [key for key in plain if not plain[key].any()],
            "expert rank": expert_rank,
        }
    return results


def test_every_gradient_is_megatrons(ranks: Any):
    """C80: experts without tokens, two micro-batches, and memory that nobody wrote is NaN. C84: tokens travel to
    experts of other ranks and back."""
    for rank, results in enumerate(ranks(4).run(compared, timeout=100)):
        for name, found in results.items():
            assert found["same names"], name
            assert found["off"] == [], (rank, name)
            # experts 2 and 3 got no token: exact zeros, and no gradient of another expert in their place
            dead = {"starved": found["expert rank"] == 1, "starved on one axis": True}.get(name, False)
            assert len(found["without"]) == (2 * 2 * 2 if dead else 0), (rank, name)
            assert found["without"] == found["without in Megatron"]


def test_the_bound_would_show_a_gradient_scaled_by_the_wrong_axis(ranks: Any):
    """[Note: the scale of expert gradients], left out."""
    for off in ranks(4).run(unbalanced, timeout=60):
        assert off
        assert all(".local_experts." in key for key in off)


def unbalanced() -> list[str]:
    case = dataclasses.replace(MOE, ep=2, egtp=2)
    with mock.patch.object(building, "balance_expert_gradients"):
        (plain, _), (sharded, _) = gradients(case.unsharded(), False), gradients(case, False)
    far = {key: float((plain[key] - sharded[key]).abs().max() / plain[key].abs().max()) for key in plain}
    assert all(distance == 0 or distance > 160 * 2**-24 for distance in far.values())
    return [key for key, distance in far.items() if distance > 0]


def axes() -> dict[str, Any]:
    with environment(LAYOUTS["ep2 gtp4"]):
        dense_only = weights_by_axis(Job(LAYOUTS["ep2 gtp4"]))
    case = LAYOUTS["ep2 egtp2 gtp2"]
    with environment(case):
        return {"both": weights_by_axis(Job(case)), "dense only": dense_only, "groups": groups(case)}


def groups(case: Case) -> tuple[list[int], list[int]]:
    from megatron.core import parallel_state

    dense, expert = parallel_state.get_gtp_weight_remat_group(), parallel_state.get_expert_gtp_weight_remat_group()
    return dist.get_process_group_ranks(dense), dist.get_process_group_ranks(expert)


def weights_by_axis(job: Job) -> dict[str, Any]:
    """Name to (ranks that share it, logical shape), or None where replicated."""
    return {
        name: (dist.get_process_group_ranks(p.group), tuple(p.logical_shape))
        if isinstance(p, MegatronGTPWeight)
        else None
        for name, p in job.chunks[0].module.named_parameters()
    }


def test_experts_have_an_axis_of_their_own(ranks: Any):
    for found in ranks(4).run(axes):
        dense, expert = found["groups"]
        assert dense != expert
        weights = found["both"]
        layer = "decoder.layers.0"
        assert weights[f"{layer}.mlp.experts.local_experts.1.linear_fc1.weight"] == (expert, (48, 32))
        assert weights[f"{layer}.mlp.experts.local_experts.1.linear_fc2.weight"] == (expert, (32, 24))
        assert weights[f"{layer}.mlp.shared_experts.linear_fc1.weight"] == (dense, (48, 32))
        assert weights[f"{layer}.self_attention.linear_qkv.weight"] == (dense, (96, 32))
        replicated = [name for name, weight in weights.items() if weight is None]
        assert [n for n in replicated if "layers.1" not in n] == [
            f"{layer}.input_layernorm.weight",
            f"{layer}.pre_mlp_layernorm.weight",
            f"{layer}.mlp.router.weight",
            "decoder.final_layernorm.weight",
        ]
        experts = [w for name, w in found["dense only"].items() if ".local_experts." in name]
        assert experts == [None] * len(experts) != []


def grouped_gemm() -> tuple[list[float], list[float], list[str]]:
    """Losses of the local spec without and with `moe_grouped_gemm`; the class of its experts then."""
    case = dataclasses.replace(MOE, ep=2, egtp=2, steps=2)
    with environment(case):
        config = model_config(case)
        config.moe_grouped_gemm = True
        (model,) = bare_models(case, config, moe_grouped_gemm=True)
        job = Job(case, [model])
        for step in range(case.steps):
            job.step(step)
        kinds = [type(layer.mlp.experts).__name__ for layer in model.decoder.layers]
    return train(case).losses, job.losses, kinds


def test_grouped_gemms_need_te_and_the_local_spec_runs_experts_one_by_one(ranks: Any):
    """megatron-core has no grouped GEMM of its own: without Transformer Engine the setting changes nothing."""
    for one_by_one, grouped, kinds in ranks(4).run(grouped_gemm):
        assert kinds == ["SequentialMLP"] * 2
        assert grouped == one_by_one


class Watch:
    """Looks, at each use of a weight, whether any two gathered weights that somebody may still read share memory."""

    def __init__(self) -> None:
        self.living: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self.most = 0
        self.shared: set[tuple[str, str]] = set()

    def look(self, waiting: list[tuple[str, torch.Tensor]]) -> None:
        """`waiting`: copies that nobody has used yet."""
        held = [(name, tensor) for name, reference in self.living if (tensor := reference()) is not None]
        self.living = [(name, weakref.ref(tensor)) for name, tensor in held]
        # one gathered copy may be handed out several times
        spans = sorted({(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in held + waiting})
        self.most = max(self.most, len(spans))
        for (_, end, name), (start, _, other) in itertools.pairwise(spans):
            if start < end and name != other:
                self.shared.add((name, other))


def live_weights(case: Case) -> tuple[set[tuple[str, str]], int, int]:
    """Weights that shared memory while both were alive; most alive at once; prefetch hits."""
    watch = Watch()
    hand_out = Gatherer._hand_out

    def watched(gatherer: Any, group: Any, copy: Any) -> Any:
        full = hand_out(gatherer, group, copy)
        watch.living.append((group.name, weakref.ref(full[0])))
        watch.look([(gatherer._groups[i].name, c.outs[0]) for i, c in gatherer._resident.items() if c is not copy])
        return full

    with environment(case), mock.patch.object(Gatherer, "_hand_out", watched):
        job = Job(case)
        for step in range(3):
            job.step(step)
        stats = gtp.megatron.runtime_of(job.chunks[0]).stats()
    return watch.shared, watch.most, stats.prefetch_hits


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_no_two_live_weights_share_memory(ranks: Any, recompute: str | None):
    case = dataclasses.replace(MOE, layers=3, ep=2, egtp=2, gtp=2, microbatches=2, recompute=recompute)
    for shared, most, hits in ranks(4).run(live_weights, case):
        assert shared == set()
        assert most >= 3
        assert hits > 0


def test_the_watch_sees_what_it_is_to_see():
    watch, memory = Watch(), torch.zeros(8)
    used, waiting = memory[:5], memory[5:]
    watch.living.append(("used", weakref.ref(used)))
    watch.look([("waiting", waiting)])
    assert watch.shared == set()
    watch.look([("waiting", memory[4:])])
    assert watch.shared == {("used", "waiting")}
    watch.shared.clear()
    del used
    watch.look([("waiting", memory[4:])])
    assert watch.shared == set()

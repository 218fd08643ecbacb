"""A GPTModel built with Megatron's flag has GTPWeights: what they are, what they cost, how long they live."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gtp
import gtp.megatron
from gtp.megatron.surface import WEIGHT
from gtp.runtime.process_group import gather_now
from gtp.testing.collectives import collective_log
from tests.megatron.training import SEQ, VOCAB, Case, Job, bare_models, environment, model_config, train
from tests.weights.side_by_side import settled

LAYER = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
SHARDED = [
    "embedding.word_embeddings.weight",
    *(f"decoder.layers.{layer}.{name}.weight" for layer in range(2) for name in LAYER),
    "output_layer.weight",
]


def full_values(case: Case) -> dict[str, torch.Tensor]:
    """Every parameter of a freshly built model at its full (TP-local) size."""
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        return {
            name: p.full_tensor() if isinstance(p, gtp.GTPWeight) else p.detach().clone()
            for name, p in model.named_parameters()
        }


def same_start(cpu_init: bool) -> list[bool]:
    start = full_values(Case(gtp=1, cpu_init=cpu_init, bias=True))
    others = [full_values(Case(gtp=size, cpu_init=cpu_init, bias=True, alignment=5)) for size in (2, 4)]
    return [torch.equal(full[name], start[name]) for full in others for name in start]


@pytest.mark.parametrize("cpu_init", [True, False], ids=["cpu_init", "device_init"])
def test_one_seed_gives_one_model_at_every_gtp_size(ranks: Any, cpu_init: bool):
    for equal in ranks(4).run(same_start, cpu_init):
        assert len(equal) > 2 * len(SHARDED)
        assert all(equal)


def facts_about_weights() -> dict[str, Any]:
    case = Case(gtp=2, alignment=7)
    with environment(case):
        job = Job(case)
        named = dict(job.chunks[0].module.named_parameters())
        weights = {n: p for n, p in named.items() if isinstance(p, gtp.megatron.MegatronGTPWeight)}
        qkv = weights["decoder.layers.0.self_attention.linear_qkv.weight"]
        added_before = {w.grad_added_to_main_grad for w in weights.values()}
        job.step(0)
        return {
            "sharded": list(weights),
            "replicated": [n for n in named if n not in weights],
            "shapes": (tuple(qkv.shape), tuple(qkv.logical_shape), qkv.gtp_remat_size, qkv.pad_length),
            "from megatron": (qkv.tensor_model_parallel, qkv.partition_dim, qkv.partition_stride, qkv.allreduce),
            "main_grad": {(w.main_grad.shape == w.shape, w.main_grad.dtype) for w in weights.values()},
            "added": (added_before, {w.grad_added_to_main_grad for w in weights.values()}),
            "not served": [row.name for row in WEIGHT if row.served == "class" and not hasattr(qkv, row.name)],
            "absent": [row.name for row in WEIGHT if row.served == "absent" and hasattr(qkv, row.name)],
            "members": [w is m for w in weights.values() for m in w._weights],
            "names": [w.name for w in weights.values()] == list(weights),
            "groups": {g.name for g in gtp.megatron.runtime_of(job.chunks[0]).groups} == set(weights),
            "offload": qkv.get_data_tensors()[0] is qkv,
            "padding": [bool(w.detach()[w.layout.valid_rows :].any()) for w in weights.values()],
        }


def test_weights_are_sharded_and_keep_what_megatron_put_on_them(ranks: Any):
    """C90: what is sharded, by name. C16, C18: 96 rows in sevens; padding stays zero under weight decay."""
    for facts in ranks(2).run(facts_about_weights):
        assert sorted(facts["sharded"]) == sorted(SHARDED)
        assert facts["replicated"] == [n for n in facts["replicated"] if n.endswith("layernorm.weight")]
        assert len(facts["replicated"]) == 5
        # 96 rows of query, key and value over 2 ranks, in sevens: 49 rows a rank, 2 of padding
        assert facts["shapes"] == ((49, 32), (96, 32), 2, 2)
        assert facts["from megatron"] == (True, 0, 1, True)
        assert facts["main_grad"] == {(True, torch.float32)}
        assert facts["added"] == ({False}, {True})
        assert facts["not served"] == facts["absent"] == []
        assert facts["members"] == [True] * len(SHARDED)
        assert (facts["names"], facts["groups"], facts["offload"]) == (True, True, True)
        assert not any(facts["padding"])


def bytes_held(case: Case) -> tuple[int, int]:
    """(bytes of weights, gradients and Adam's state; those of the parameters that stay replicated)."""
    with environment(case):
        job = Job(case)
        job.step(0)
        parameters = list(job.chunks[0].module.parameters())
        state = [t for s in job.optimizer.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        tensors = [*(p.detach() for p in parameters), *(p.main_grad for p in parameters), *state]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        replicated = sum(p.numel() for p in parameters if not isinstance(p, gtp.GTPWeight))
        steps = sum(t.nbytes for t in state if t.numel() == 1)
        return sum(storages.values()) - steps, 16 * replicated


def both_memories() -> tuple[tuple[int, int], tuple[int, int]]:
    return bytes_held(Case(gtp=1)), bytes_held(Case(gtp=4))


def test_memory_is_a_share_of_the_weights_plus_what_is_replicated(ranks: Any):
    """C90: a rank holds a fourth, gradients and optimizer state included."""
    for (whole, _), (share, replicated) in ranks(4).run(both_memories):
        # DistributedDataParallel pads its gradient buffer to 64 elements
        assert share <= (whole - replicated) / 4 + replicated + 64 * 4


def steady_hits() -> float:
    case = Case(gtp=2, microbatches=2)
    with environment(case):
        job = Job(case)
        runtime = gtp.megatron.runtime_of(job.chunks[0])
        for step in range(2):
            job.step(step)
        before = runtime.stats()
        for step in range(4):
            job.step(step)
        after = runtime.stats()
        return (after.prefetch_hits - before.prefetch_hits) / (after.consumes - before.consumes)


def test_weights_are_there_when_they_are_needed(ranks: Any):
    assert all(hits >= 0.95 for hits in ranks(2).run(steady_hits))


def references_left() -> list[bool]:
    left = []
    case = Case(gtp=2)
    with environment(case):
        for _ in range(3):
            job = Job(case)
            job.step(0)
            runtime = gtp.megatron.runtime_of(job.chunks[0])
            watched: list[Any] = [weakref.ref(job.chunks[0].module), weakref.ref(runtime)]
            watched += [weakref.ref(p) for p in job.chunks[0].parameters()]
            del job, runtime
            gc.collect()
            left += settled(
                lambda watched=watched: [ref() is not None for ref in watched], lambda alive: not any(alive)
            )
    return left


def test_a_deleted_model_is_freed(ranks: Any):
    """C50: nothing in the process remembers it."""
    for left in ranks(2).run(references_left):
        assert len(left) > 3 * len(SHARDED)
        assert not any(left)


def by_turns() -> tuple[list[float], list[float], list[float], list[float]]:
    """Two models in one process, each step of one between two of the other, one of them evaluated in between too."""
    one, two = Case(gtp=2), Case(gtp=2, hidden=48, tied=True)
    alone = train(one).losses, train(two).losses
    with environment(one):
        first = Job(one)
        torch.manual_seed(7)
        second = Job(two)
        for step in range(one.steps):
            first.step(step)
            second.step(step)
            evaluate(first)
    return *alone, first.losses, second.losses


def evaluate(job: Job) -> None:
    model = job.chunks[0]
    model.eval()
    ids = torch.arange(SEQ).remainder(VOCAB)[None]
    with torch.no_grad():
        logits = model(ids, ids, torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1))
    assert torch.isfinite(logits).all()
    model.train()


def test_two_models_by_turns_do_not_see_each_other(ranks: Any):
    """C50; C37: one is evaluated between its steps."""
    for first_alone, second_alone, first, second in ranks(2).run(by_turns):
        assert first == first_alone
        assert second == second_alone
        assert first != second


class _Failure(Exception):
    pass


def interrupted(where: str) -> tuple[list[float], list[float]]:
    case = Case(gtp=2, steps=3)
    undisturbed = train(case).losses
    with environment(case):
        job = Job(case)
        for step in range(case.steps):
            for handle in _fail_in(job, where):
                with pytest.raises(_Failure):
                    job.step(99, update=False)
                handle.remove()
            job.step(step)
    return undisturbed, job.losses


def _fail_in(job: Job, where: str) -> Iterator[Any]:
    layer = job.chunks[0].module.decoder.layers[1].mlp.linear_fc1

    def fail(*_: Any) -> None:
        raise _Failure

    yield layer.register_forward_hook(fail) if where == "forward" else layer.register_full_backward_pre_hook(fail)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_exception_is_right(ranks: Any, where: str):
    """C48."""
    for undisturbed, losses in ranks(2).run(interrupted, where):
        assert losses == undisturbed


def loaded_from_full_tensors() -> tuple[list[float], list[float]]:
    """A plain state dict of full tensors, as an unsharded model gives, loaded under the flag."""
    case = Case(gtp=2)
    with environment(case.unsharded()):
        torch.manual_seed(11)
        plain = Job(case.unsharded())
        state = {k: v.clone() if v is not None else None for k, v in plain.chunks[0].module.state_dict().items()}
        for step in range(case.steps):
            plain.step(step)
    with environment(case):
        sharded = Job(case)
        result = sharded.chunks[0].module.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        for step in range(case.steps):
            sharded.step(step)
    return plain.losses, sharded.losses


def test_a_full_state_dict_loads(ranks: Any):
    for plain, sharded in ranks(2).run(loaded_from_full_tensors):
        assert sharded == plain


def with_one_shard() -> tuple[Any, Any, list[str], list[str]]:
    """Training of a model without a GTP axis: in Megatron alone, and with gtp installed; the collectives of each."""
    case, results, logs = Case(steps=3, bias=True), [], []
    for installed in (False, True):
        with environment(case):
            if not installed:
                gtp.megatron.uninstall()
            try:
                job = Job(case)
                with collective_log() as log:
                    for step in range(case.steps):
                        job.step(step)
                results.append(job.result())
                logs.append([f"{r.kind} {r.shape} {r.group}" for r in log.started()])
            finally:
                if not installed:
                    gtp.megatron.install()
    return *results, *logs


def test_without_a_gtp_axis_nothing_differs_from_megatron_alone(ranks: Any):
    """C25. So what other tests compare with, a model of one shard, is Megatron without gtp."""
    for alone, installed, collectives, with_gtp in ranks(2).run(with_one_shard):
        assert installed.sharded == []
        assert installed.losses == alone.losses
        assert installed.norms == alone.norms
        assert with_gtp == collectives
        assert len(collectives) > 3


MODELS = {
    "mla": Case(gtp=2, mla=True),
    "mtp": Case(gtp=2, mtp=1),
    "hybrid": Case(gtp=2, hybrid="M*-"),
    "experts": Case(gtp=2, egtp=2, experts=4, shared_expert=True),
}


def whole_matrices() -> dict[str, list[str]]:
    """Per model, what has several dimensions and is not sharded."""
    found = {}
    for name, case in MODELS.items():
        with environment(case):
            (model,) = bare_models(case, model_config(case))
            named = list(model.named_parameters())
            assert sum(isinstance(p, gtp.GTPWeight) for _, p in named) >= 8
            found[name] = [n for n, p in named if p.dim() > 1 and not isinstance(p, gtp.GTPWeight)]
    return found


def test_no_layer_of_any_model_is_left_out(ranks: Any):
    """C92: routers stay whole because each rank routes its own tokens, convolutions because they are small."""
    for found in ranks(2).run(whole_matrices):
        assert found["mla"] == found["mtp"] == []
        assert [name.replace("_", ".") for name in found["hybrid"]] == ["decoder.layers.0.mixer.conv1d.weight"]
        assert found["experts"] == [f"decoder.layers.{layer}.mlp.router.weight" for layer in range(2)]


def masters_and_copies() -> tuple[list[bool], list[float]]:
    """After each step, whether what is gathered of a weight is its fp32 master in bf16; and the losses."""
    case = Case(gtp=2, bf16=True, grad_fp32=True)
    equal = []
    with environment(case):
        job = Job(case)
        (optimizer,) = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
        for _ in range(case.steps):
            job.step(0)
            for weights, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
                for weight, master in zip(weights, masters, strict=True):
                    if isinstance(weight, gtp.GTPWeight):
                        rows = gather_now(master.detach(), weight.group)[: weight.layout.rows]
                        equal.append(torch.equal(weight.full_tensor().detach(), rows.bfloat16()))
        return equal, job.losses


def test_bf16_weights_are_their_masters_after_every_step(ranks: Any):
    """C07."""
    for equal, losses in ranks(2).run(masters_and_copies):
        assert equal == [True] * (5 * len(SHARDED))
        assert losses[-1] < losses[0] - 0.1

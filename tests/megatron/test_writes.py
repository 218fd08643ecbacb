"""Weights written by hand, through `.data` and `.detach()`, while others are using them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import gtp
import gtp.megatron
from gtp.megatron.memory import ShardMemory
from gtp.testing.collectives import RaceError
from tests.megatron.models import bare_models, model_config
from tests.megatron.test_ordering import late
from tests.megatron.test_parity import ORDER
from tests.megatron.training import Case, Job, environment, train


def by_data(weight: Any) -> None:
    weight.data.mul_(3.0)


def by_detach(weight: Any) -> None:
    weight.detach()[:] = weight.detach() * 3.0


def by_a_view(weight: Any) -> None:
    weight.data.view(-1)[:].mul_(3.0)


def by_a_list(weight: Any) -> None:
    torch._foreach_mul_([weight.data], 3.0)


def by_out(weight: Any) -> None:
    torch.mul(weight.data, 3.0, out=weight.data)


def by_another_tensor(weight: Any) -> None:
    weight.data = weight.data * 3.0


WAYS = [by_data, by_detach, by_a_view, by_a_list, by_out, by_another_tensor]


def written_in_forwards(case: Case, write: Callable[[Any], None]) -> list[float]:
    """From the second step on a weight of the last layer, on its way to the ranks, is written."""
    with environment(case):
        job = Job(case)
        first, *_, last = job.chunks[0].module.decoder.layers
        weight = last.self_attention.linear_qkv.weight

        def hook(*_: Any) -> None:
            if len(job.losses) >= 1:
                with torch.no_grad():
                    write(weight)

        first.mlp.linear_fc2.register_forward_pre_hook(hook)
        for step in range(case.steps):
            job.step(step)
        return job.losses


CASE = Case(gtp=2, steps=4, alignment=7)


def written_by_each_way() -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for write in WAYS:
        plain = written_in_forwards(CASE.unsharded(), write)
        with late():
            found[write.__name__] = plain, written_in_forwards(CASE, write)
    return found


def test_a_write_in_a_forward_waits_for_gathers_and_is_seen_by_the_next_use(ranks: Any):
    unwritten = ranks(2).run(train, CASE.unsharded())[0].losses
    for ways in ranks(2).run(written_by_each_way, timeout=120):
        assert len(ways) == len(WAYS)
        for way, (plain, sharded) in ways.items():
            assert sharded == pytest.approx(plain, rel=0, abs=ORDER), way
            assert abs(plain[-1] - unwritten[-1]) > 1e-3


def by_plain_memory() -> str:
    weight = gtp.megatron.MegatronGTPWeight
    try:
        with mock.patch.object(weight, "writable_shard", weight.plain_shard), late():
            written_in_forwards(CASE, by_data)
    except RaceError as error:
        return str(error)
    return "no race was seen"


def test_a_write_that_does_not_wait_would_be_seen(ranks: Any):
    for text in ranks(2).run(by_plain_memory):
        assert "changed while" in text


def facts() -> dict[str, Any]:
    case = Case(gtp=2, alignment=7)
    with environment(case):
        (model,) = bare_models(case, model_config(case))
        weight = model.decoder.layers[0].mlp.linear_fc1.weight  # 80 rows in shards of 42
        before = weight._version
        with torch.no_grad():
            weight.data[3:].fill_(2)
            first = weight._version
            weight.data.copy_(weight)
            weight.detach().mul_(2)
        memory = weight.data
        refused = []
        for wrong in (torch.zeros(80, 32), torch.zeros(42, 32, dtype=torch.bfloat16)):
            with pytest.raises(gtp.GTPValueError) as error:
                weight.data = wrong
            refused.append(str(error.value))
        held, weight.data = memory, torch.ones(42, 32)
        return {
            "counted": first > before and weight._version > first,
            "values": sorted(set(held.clone().view(-1)[3 * 32 :].tolist())),
            "padding": (weight.pad_length, held[weight.layout.valid_rows :].unique().tolist()),
            "plain": [type(t) for t in (memory + 1, memory.clone(), copy.deepcopy(memory))],
            "pickled": type(pickle.loads(pickle.dumps(memory))),
            "views": [type(t) for t in (memory.data, memory[1:], *memory.split(30))],
            "refused": refused,
            "kind": memory.type(),
            "root": memory._base is None,
        }


def test_it_is_plain_memory_to_who_reads_it(ranks: Any):
    for rank, found in enumerate(ranks(2).run(facts)):
        assert found["counted"]
        # rank 1 holds 38 rows and 4 of padding
        assert found["values"] == ([4.0] if rank == 0 else [0.0, 4.0])
        assert found["padding"] == (4, [] if rank == 0 else [0.0])
        assert found["plain"] == [torch.Tensor] * 3
        assert found["pickled"] is torch.Tensor
        assert found["views"] == [ShardMemory] * 4
        assert "must keep shape, dtype and device type ((42, 32), torch.float32, 'cpu')" in found["refused"][0]
        assert "torch.bfloat16" in found["refused"][1]
        assert found["kind"] == "torch.cuda.FloatTensor"  # as `megatron_on_cpu` says
        assert found["root"]

"""Checkpoints through `megatron.core.dist_checkpointing`: one file for every layout, with gtp and without.

Every save is compared with the file that Megatron without gtp wrote: same keys, same shapes, same bits, each element
written by one rank. Alignment 16 makes shards that are partly or wholly padding, and shards of a gated fc1 that reach
from one half into the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import gtp
import gtp.megatron
from tests.megatron.training import Case, Job, environment, model_config

DENSE = Case(alignment=16, gqa=True, bias=True, distributed_optimizer=True, clip=1.0)
LAYOUTS = {
    "tp1 gtp2": {"gtp": 2},
    "tp2 gtp1": {"tp": 2},
    "tp1 gtp4": {"gtp": 4},
    "tp2 gtp2": {"tp": 2, "gtp": 2},
    "pp2 gtp2": {"pp": 2, "gtp": 2},
    "unsharded": {},
}
# Megatron itself cannot load the optimizer of a model with expert parallelism without it: they are two and one
EXPERTS = dataclasses.replace(DENSE, layers=1, bias=False, experts=4, shared_expert=True, ep=2)
EXPERT_LAYOUTS = {
    "egtp2": {"egtp": 2},
    "egtp2 gtp2": {"egtp": 2, "gtp": 2},
    "ep4 gtp2": {"ep": 4, "gtp": 2},
    "tp2 gtp2 egtp2": {"tp": 2, "gtp": 2, "etp": 1, "egtp": 2, "sequence_parallel": True},
    "unsharded": {},
}


# what these models have beside a GPT's matrices: compressed projections, layers after the last, stacks of five; in one
# layer, since DENSE has two
MODELS = {
    "mla": dataclasses.replace(DENSE, layers=1, gqa=False, bias=False, mla=True),
    "mtp": dataclasses.replace(DENSE, layers=1, mtp=1),
    "mtp tied": dataclasses.replace(DENSE, layers=1, mtp=2, tied=True),
    "hybrid": dataclasses.replace(DENSE, bias=False, hybrid="M*-"),
}
MODEL_LAYOUTS = {"tp1 gtp4": {"gtp": 4}, "tp2 gtp2": {"tp": 2, "gtp": 2}, "unsharded": {}}


@contextlib.contextmanager
def job(case: Case, seed: int, plain: bool = False) -> Iterator[Job]:
    """A fresh model; `plain`: in Megatron without gtp."""
    with environment(case):
        if plain:
            gtp.megatron.uninstall()
        try:
            torch.manual_seed(seed)
            yield Job(case)
        finally:
            if plain:
                gtp.megatron.install(gtp.GTPConfig(alignment=case.alignment))


def described(job: Job, kind: str, loading: bool = False) -> dict[str, Any]:
    """The sharded state dict of model and optimizer."""
    metadata = {
        "distrib_optim_sharding_type": kind,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": job.parallel.get_data_parallel_group(with_context_parallel=True),
    }
    model = job.chunks[0].module.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": job.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(metadata)),
    }


def save(job: Job, folder: str, kind: str = "fully_reshardable") -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    # the writer hands its results over through a process of its own, which ranks of a pool may not start
    with mock.patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
        dist_checkpointing.save(described(job, kind), folder)


def load(job: Job, folder: str, kind: str = "fully_reshardable") -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(described(job, kind, loading=True), folder)
    job.chunks[0].module.load_state_dict(loaded["model"])
    # Megatron copies into views of fp32 weights, for buckets without no_grad
    with torch.no_grad():
        job.optimizer.load_state_dict(loaded["optimizer"])


def written(job: Job) -> str:
    """What is wrong with who writes what: every element is to be written by exactly one rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    entries = described(job, "fully_reshardable")
    apply_factories(entries)
    mine = [
        (
            e.key,
            e.global_shape,
            e.global_offset,
            e.prepend_axis_num,
            tuple(e.local_shape),
            is_main_replica(e.replica_id),
        )
        for e in nested_values(entries)
        if isinstance(e, ShardedTensor)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    times: dict[str, torch.Tensor] = {}
    for key, shape, offset, prepended, local, main in (entry for rank in everyone for entry in rank):
        count = times.setdefault(key, torch.zeros(shape))
        sizes = (1,) * prepended + local
        if main:
            count[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] += 1
    return ", ".join(key for key, count in times.items() if not bool((count == 1).all()))


def contents(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of the file, whole; read by rank 0."""
    if dist.get_rank() > 0:
        return {}
    reader = FileSystemReader(folder)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch.distributed.checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def differences(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    wrong = sorted(before.keys() ^ after.keys())
    for key in before.keys() & after.keys():
        if before[key].dtype != after[key].dtype or not torch.equal(before[key], after[key]):
            wrong.append(f"{key} {tuple(before[key].shape)} {tuple(after[key].shape)}")
    return wrong


def travel(base: Case, layouts: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Plain Megatron trains and saves; each layout loads what the one before it saved, and saves."""
    with job(base, seed=1, plain=True) as source:
        source.step(0)
        source.step(1)
        save(source, f"{folder}/plain")
    first = contents(f"{folder}/plain")
    wrong: dict[str, Any] = {}
    before = "plain"
    for number, (name, layout) in enumerate(layouts.items()):
        with job(dataclasses.replace(base, **layout), seed=2 + number, plain=not name.count("gtp")) as target:
            load(target, f"{folder}/{before}")
            before = name.replace(" ", "_")
            save(target, f"{folder}/{before}")
            found = differences(first, contents(f"{folder}/{before}"))
            writers = written(target)
            if found or writers:
                wrong[name] = (found, writers)
    sizes = {key: tuple(value.shape) for key, value in first.items() if not key.startswith("optimizer")}
    states = sum(key.startswith("optimizer.state.exp_avg.") and bool(value.any()) for key, value in first.items())
    return {"wrong": wrong, "sizes": sizes, "states": states}


@pytest.mark.parametrize(("base", "layouts"), [(DENSE, LAYOUTS), (EXPERTS, EXPERT_LAYOUTS)], ids=["dense", "experts"])
def test_one_file_for_every_layout(ranks: Any, tmp_path: Path, base: Case, layouts: dict[str, Any]):
    results = ranks(4).run(travel, base, layouts, str(tmp_path), timeout=100)
    assert [found["wrong"] for found in results] == [{}] * 4
    assert results[0]["states"] == len(results[0]["sizes"])
    assert results[0]["sizes"]["embedding.word_embeddings.weight"] == (96, 32)


@pytest.mark.parametrize("model", MODELS)
def test_other_models_have_one_file_for_every_layout_too(ranks: Any, tmp_path: Path, model: str):
    results = ranks(4).run(travel, MODELS[model], MODEL_LAYOUTS, str(tmp_path), timeout=100)
    assert [found["wrong"] for found in results] == [{}] * 4
    assert results[0]["states"] == len(results[0]["sizes"])
    in_proj = {key: size for key, size in results[0]["sizes"].items() if "in_proj" in key}
    assert [key.rpartition(".")[2] for key in in_proj] == (["z", "x", "B", "C", "dt"] if model == "hybrid" else [])


def resumed(case: Case, kind: str, folder: str) -> tuple[list[float], list[float], list[float], bool]:
    """Losses of six steps; of three after a save; of the same three by another model that loaded; equal at the end."""
    with job(case, seed=1) as whole:
        for step in range(6):
            if step == 3:
                save(whole, folder, kind)
            whole.step(step)
        expected = [p.detach().clone() for p in whole.chunks[0].module.parameters()]
    with job(case, seed=2) as rest:
        load(rest, folder, kind)
        for step in range(3, 6):
            rest.step(step)
        equal = all(map(torch.equal, expected, (p.detach() for p in rest.chunks[0].module.parameters())))
    return whole.losses, whole.norms[3:] + whole.losses[3:], rest.norms + rest.losses, equal


RESUMED = {
    "model space": (dataclasses.replace(DENSE, tp=2, gtp=2), "fully_reshardable"),
    "buckets": (dataclasses.replace(DENSE, gtp=2, bucket_size=3000, overlap_grad=True), "dp_reshardable"),
    "without the distributed optimizer": (dataclasses.replace(DENSE, layers=1, gtp=4, distributed_optimizer=False), ""),
    # without biases: Megatron's optimizer mixes up parameters where one group has two dtypes, and these norms are fp32
    "bf16": (
        dataclasses.replace(DENSE, layers=1, gtp=2, bias=False, tied=True, bf16=True, grad_fp32=True),
        "fully_reshardable",
    ),
    "experts": (dataclasses.replace(EXPERTS, gtp=2, egtp=2), "fully_reshardable"),
    "hybrid": (dataclasses.replace(MODELS["hybrid"], gtp=2, overlap_grad=True), "fully_reshardable"),
    "hybrid without it": (dataclasses.replace(MODELS["hybrid"], gtp=4, distributed_optimizer=False), ""),
    "mtp": (dataclasses.replace(MODELS["mtp tied"], gtp=2), "fully_reshardable"),
}


def all_resumed(folder: str) -> dict[str, Any]:
    return {name: resumed(case, kind, f"{folder}/{name}") for name, (case, kind) in RESUMED.items()}


def test_resuming_changes_no_bit(ranks: Any, tmp_path: Path):
    """C32: every rank reads its own state back, of buckets and of an optimizer that is not distributed, too."""
    for found in ranks(4).run(all_resumed, str(tmp_path), timeout=100):
        for name, (losses, expected, again, equal) in found.items():
            assert losses[-1] != losses[2], name
            assert again == expected, name
            assert equal, name


def delta_net() -> list[tuple[str, bool]]:
    """Parts of a gated delta net's in_proj by Megatron's own description, each whole from both ranks' rows."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.ssm.gated_delta_net.common import _GDNBase
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class Net(_GDNBase):
        """What `sharded_state_dict` reads of it; the rest needs kernels."""

        def __init__(self, config: Any) -> None:
            torch.nn.Module.__init__(self)
            self.in_proj = ColumnParallelLinear(
                32, 24, config=config, init_method=config.init_method, bias=False, skip_bias_add=False
            )
            self.conv1d = torch.nn.Conv1d(12, 12, 2, groups=12, bias=False)
            self.conv_bias, self.conv_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp = False, 12, 3, 6
            self.in_proj_dim, self.tp_size = 24, 1
            self.in_proj_split_sections, self.in_proj_split_names = (3, 3, 6, 6, 6), ["q", "k", "v", "z", "b"]

    case = Case(gtp=2, alignment=8)
    with environment(case):
        net = Net(model_config(case))
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        tp_group = parallel_state.get_tensor_model_parallel_group()
        entry = net.sharded_state_dict("net.", (), metadata, tp_group)["net.in_proj.weight"]
        assert entry.data is net.in_proj.weight
        full = net.in_proj.weight.full_tensor()
        mine = [part for part in entry.build().values() if isinstance(part, ShardedTensor)]
        parts = [(part.key, part.global_shape, part.global_offset, part.data) for part in mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    top, found = 0, []
    for name, height in zip(net.in_proj_split_names, net.in_proj_split_sections, strict=True):
        whole = torch.full((height, 32), float("nan"))
        for key, shape, offset, data in (part for rank in everyone for part in rank):
            if key == f"net.in_proj.weight.{name}":
                assert shape == (height, 32)
                whole[offset[0] : offset[0] + len(data)] = data
        found.append((name, torch.equal(whole, full[top : top + height])))
        top += height
    return found


def test_a_gated_delta_nets_in_proj_is_saved_in_its_parts(ranks: Any):
    for found in ranks(4).run(delta_net):  # two replicas of two shards, on the pool of the tests above
        assert found == [("q", True), ("k", True), ("v", True), ("z", True), ("b", True)]

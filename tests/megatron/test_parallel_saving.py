"""Checkpoints that data-parallel ranks write together, as a request that is carried out later: the same file."""

from __future__ import annotations

import dataclasses
import queue
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.megatron.test_checkpoints import DENSE, EXPERTS, contents, described, job, save
from tests.megatron.training import Case

CASES = {
    "dense": dataclasses.replace(DENSE, gtp=2),
    "tensor parallel": dataclasses.replace(DENSE, tp=2, gtp=2),
    "experts": dataclasses.replace(EXPERTS, egtp=2, gtp=2),
}


def saved_both_ways(case: Case, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What Megatron's default strategy writes, and what `fully_parallel` and asynchronous saving together do."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    with job(case, seed=7) as trained:
        trained.step(0)
        save(trained, f"{folder}/one")
        if dist.get_rank() == 0:
            Path(f"{folder}/other").mkdir()
        dist.barrier()
        group = trained.parallel.get_data_parallel_group(with_context_parallel=True)
        with mock.patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
            request: Any = dist_checkpointing.save(
                described(trained, "fully_reshardable"),
                f"{folder}/other",
                FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group, True),
                async_sharded_save=True,
                async_strategy="mcore",
            )
            request.execute_sync()
        dist.barrier()
        return contents(f"{folder}/one"), contents(f"{folder}/other")


def test_the_same_file_comes_of_it(ranks: Any, tmp_path: Path):
    for name, case in CASES.items():
        one, other = ranks(4).run(saved_both_ways, case, str(tmp_path / name), timeout=120)[0]
        assert len(one) > 40
        assert other.keys() == one.keys()
        for key, value in one.items():
            assert torch.equal(other[key], value), (name, key)

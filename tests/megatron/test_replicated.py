"""What is not sharded is equal on all ranks of the GTP axis, also where ranks draw random numbers of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import gtp.megatron
from gtp.testing import ranks as inside
from tests.megatron.training import Case, Job, environment

CASES = {
    "dense and expert axes": Case(gtp=2, egtp=2, experts=2, layers=1, bias=True, cpu_init=False),
    "experts over ranks": Case(gtp=2, ep=2, experts=2, layers=1, cpu_init=False),
}


def seeded_by_rank() -> dict[str, tuple[list[bool], list[bool]]]:
    """Per case, whether whole parameters are equal on both ranks: before and after `broadcast_params`."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    found = {}
    for name, case in CASES.items():
        with environment(case):
            torch.manual_seed(7 + inside.rank())
            model_parallel_cuda_manual_seed(7 + 10 * inside.rank(), force_reset_rng=True)
            job = Job(case)
            whole = {
                n: p
                for n, p in job.chunks[0].module.named_parameters()
                if not isinstance(p, gtp.megatron.MegatronGTPWeight)
            }
            mine = {n: p for n, p in whole.items() if getattr(p, "allreduce", True)}
            alone = {n: p.detach().clone() for n, p in whole.items() if n not in mine}
            before = equal_on_both(mine)
            job.chunks[0].broadcast_params()
            kept = all(bool((whole[n] == value).all()) for n, value in alone.items())
            found[name] = before, [*equal_on_both(mine), kept]
    return found


def equal_on_both(parameters: dict[str, Any]) -> list[bool]:
    equal = []
    for p in parameters.values():
        other = p.detach().clone()
        dist.broadcast(other, 0)
        equal.append(bool((other == p).all()))
    return equal


def test_broadcast_params_reaches_the_gtp_axis_too(ranks: Any):
    """C62: with `data_parallel_random_init`. Experts that a rank has alone stay its own."""
    first, second = ranks(2).run(seeded_by_rank)
    for name in CASES:
        assert all(first[name][1]), name
        assert all(second[name][1]), name
        assert not all(second[name][0]), name  # routers differed

"""Errors in the middle of operations of the copy-engine backend, on simulated streams: what follows them is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch

from gtp.errors import DesyncError
from gtp.ops.collective_backends import Factor
from gtp.ops.collective_backends import copy_engine_operations as operations
from gtp.ops.collective_backends.auto import AutoBackend
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend
from tests.ops.copy_engine_ranks import CPU, Ranks, program, sizes
from tests.runtime.simulated_streams import FakeGroup, Machine, SimulatedDriver


@pytest.mark.parametrize("split", [False, True])
def test_an_error_inside_leaves_the_protocol_whole(split):
    """A user's error in every rank's block: the next operations are right."""
    with sizes(split=split):
        ranks = Ranks(2)
        for rank in range(2):
            shard = torch.ones(2, 2)
            ranks.alive.append(shard)
            with ranks.on(rank) as backend, pytest.raises(ValueError, match="mine"), backend.gather(shard, whole=True):
                raise ValueError("mine")
        program(ranks)
        ranks.finish(0)


@pytest.mark.parametrize("split, known", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("options", [{"whole": True}, {"columns": True}, {"transposed": True}], ids=str)
def test_an_error_in_a_gathers_products_leaves_the_protocol_whole(split, known, options):
    """Out of memory in every rank's first product, whatever else is on its way then."""
    with sizes(split=split):
        ranks = Ranks(3, room=1 << 12)
        kept = {name: True for name in options if name != "transposed"}
        for rank in range(3):
            shard = torch.ones(6, 4).t() if "transposed" in options else torch.ones(4, 6)
            ranks.alive.append(shard)
            fails = out_of_memory_after(0, operations.multiply)
            with ranks.on(rank) as backend, mock.patch.object(operations, "multiply", fails):
                with (
                    pytest.raises(torch.OutOfMemoryError, match="mine"),
                    backend.gather(shard, width=5 if known else 0, **kept) as gathering,
                ):
                    gathering.matmul([Factor(torch.ones(6, 5))])
        program(ranks)
        ranks.finish(0)


def out_of_memory_after(calls: int, real: Callable[..., object]) -> Callable[..., object]:
    left = iter(range(calls))

    def call(*args: object, **kwargs: object) -> object:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("mine")
        return real(*args, **kwargs)

    return call


def scatter_that_fails(ranks: Ranks, failing: Sequence[int], function: str, calls: int) -> list[torch.Tensor]:
    """A reduce-scatter that runs out of memory on some ranks; what it gives on the others."""
    outs = []
    for rank in range(ranks.size):
        a, b = torch.ones(2 * ranks.size, 2), torch.ones(2, 3)
        ranks.alive += [a, b]
        with ranks.on(rank) as backend:
            if rank not in failing:
                outs.append(ranks.copy(rank, backend.matmul_reduce_scatter([(a, b)])))
                continue
            fails = out_of_memory_after(calls, getattr(operations, function))
            with mock.patch.object(operations, function, fails), pytest.raises(torch.OutOfMemoryError, match="mine"):
                backend.matmul_reduce_scatter([(a, b)])
    return outs


@pytest.mark.parametrize("function, calls", [("sum_of_products", 0), ("sum_of_products", 1), ("sum_of_blocks", 0)])
@pytest.mark.parametrize("size", [2, 3])
def test_an_error_in_a_reduce_scatter_leaves_the_protocol_whole(size, function, calls):
    """Out of memory in the middle of it, on every rank: the next operations are right."""
    all_fail(size, function, calls, split=True)


@pytest.mark.parametrize("size, function", [
    (2, "sum_of_products"), (2, "add"), (3, "sum_of_products"), (3, "sum_of_blocks"),
])  # fmt: skip
def test_an_error_in_a_short_reduce_scatter_leaves_the_protocol_whole(size, function):
    all_fail(size, function, 0, split=False)


def all_fail(size: int, function: str, calls: int, *, split: bool) -> None:
    with sizes(split=split):
        ranks = Ranks(size, room=1 << 12)  # for all: a workspace that grows has fresh flags
        scatter_that_fails(ranks, range(size), function, calls)
        program(ranks)
        ranks.finish(0)
        program(ranks, 20)
        ranks.finish(1, ahead=1)


@pytest.mark.parametrize("split", [False, True])
def test_ranks_whose_peer_fails_alone_in_a_reduce_scatter_get_no_plausible_numbers(split):
    """They get not-a-numbers, and do not wait for ever; should all go on, the next operations are right."""
    with sizes(split=split):
        ranks = Ranks(3, room=1 << 12)
        outs = scatter_that_fails(ranks, [1], "sum_of_products", 0)
        program(ranks)
        ranks.finish(0)
        assert len(outs) == 2
        for out in outs:
            assert torch.isnan(out).all()


@pytest.mark.parametrize("kind", [CopyEngineBackend, AutoBackend])
def test_ranks_that_disagree_find_out_before_memory_is_made_together(kind):
    """Making it is collective: ranks of different shapes would hang there instead."""
    driver, made = SimulatedDriver(Machine(2), 0), []
    group = FakeGroup("tp", range(2), 0)
    backend = kind(group, CPU, driver=driver, make_arena=lambda nbytes, group: made.append(nbytes))  # type: ignore[arg-type]
    with (
        mock.patch.object(backend._agreement, "check", side_effect=DesyncError("ranks differ")),
        pytest.raises(DesyncError, match="ranks differ"),
    ):
        backend.matmul_reduce_scatter([(torch.ones(4, 8), torch.ones(8, 6))])
    assert made == []

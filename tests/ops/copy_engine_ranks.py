"""Ranks of the copy-engine backend on simulated streams, and a program for them. What the CPU tests of it share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from gtp.ops.collective_backends import Factor, copy_engine
from gtp.ops.collective_backends import copy_engine_operations as operations
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend
from tests.runtime.simulated_streams import FakeGroup, Graph, Machine, SimulatedDriver

CPU = torch.device("cpu")


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


class Ranks:
    """Simulated ranks with a backend each. Queue operations rank by rank, then `machine.run`.

    Device work of the backend is queued on the rank's simulated stream instead of being done; results are checked when
    everything has run.
    """

    def __init__(self, size: int, *, serial: bool = False, room: int = 0) -> None:
        self.size = size
        self.machine = Machine(size, serial=serial)
        self.drivers = [SimulatedDriver(self.machine, rank) for rank in range(size)]
        self.backends = []
        for rank, driver in enumerate(self.drivers):
            group = FakeGroup("tp", range(size), rank)
            backend = CopyEngineBackend(group, CPU, driver=driver, make_arena=driver.make_arena)  # type: ignore[arg-type]
            backend._agreement = None  # there is no store
            if room:
                backend.reserve(room)
            self.backends.append(backend)
        self.alive: list[torch.Tensor] = []  # a stream-ordered allocator would keep what queued work reads
        self.checks: list[Callable[[], None]] = []

    @contextmanager
    def on(self, rank: int) -> Iterator[CopyEngineBackend]:
        """Inside, device work is this rank's."""
        driver = self.drivers[rank]
        new_empty, spoil = torch.Tensor.new_empty, operations.spoil

        def queued(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.alive += [t for t in args if isinstance(t, torch.Tensor)]
                out = args[0] if real is spoil else args[3] if len(args) > 3 else kwargs.get("out")
                if out is not None:
                    driver.compute(lambda: real(*args, **kwargs), real.__name__)
                    return out
                fresh = real(*args, **kwargs).fill_(float("nan"))  # for its shape: operands are not there yet
                self.alive.append(fresh)
                driver.compute(lambda: fresh.copy_(real(*args, **kwargs)), real.__name__)
                return fresh

            return call

        def kept(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            fresh = new_empty(t, *args, **kwargs).fill_(float("nan"))
            self.alive += [t, fresh]
            return fresh

        with ExitStack() as patches:
            for name in ("multiply", "sum_of_products", "add", "sum_of_blocks", "spoil"):
                patches.enter_context(mock.patch.object(operations, name, queued(getattr(operations, name))))
            patches.enter_context(mock.patch.object(torch.Tensor, "new_empty", kept))
            yield self.backends[rank]

    def copy(self, rank: int, source: torch.Tensor) -> torch.Tensor:
        """A copy of what `source` holds when the rank's stream gets there, then scribbles over it."""
        held = torch.full_like(source, float("nan"))
        self.alive.append(source)
        self.drivers[rank].compute(lambda: held.copy_(source), "look")
        return held

    def gather(
        self,
        seed: int,
        rows: int,
        k: int,
        widths: Sequence[int],
        *,
        whole: bool = False,
        columns: bool = False,
        multiply: bool = True,
        transposed: bool = False,
        known: bool = False,
    ) -> None:
        """Queues one gather on every rank, and what it must give."""
        shards = [integers(rows, k, seed=100 * seed + rank) for rank in range(self.size)]
        full = torch.cat(shards)
        for rank in range(self.size):
            matrices = [integers(k, n, seed=100 * seed + 50 + rank + i) for i, n in enumerate(widths)]
            mine = shards[rank].clone()
            if transposed:
                mine = mine.t().contiguous().t()
            self.alive += [mine, *matrices]
            width = sum(widths) if known else 0
            with self.on(rank) as backend, backend.gather(mine, whole=whole, columns=columns, width=width) as gathering:
                # one result where it falls, the others in columns of a wider tensor, as wgrads do
                outs = [None if i == 0 else torch.full((n, rows * self.size), 7.0).t() for i, n in enumerate(widths)]
                factors = [Factor(m, out=o) for m, o in zip(matrices, outs, strict=True)]
                products = gathering.matmul(factors) if multiply else []
                seen = self.copy(rank, gathering.full()) if whole else None
                kept = gathering.columns() if columns else None
            if kept is not None:
                width = k // self.size
                want = full[:, rank * width : (rank + 1) * width]
                held = self.copy(rank, kept)
                self.checks.append(lambda held=held, want=want: _same(held, want))
            # what this rank does to its operand afterwards must not reach anybody
            self.drivers[rank].compute(lambda mine=mine: mine.fill_(float("nan")), "reuse")
            for product, matrix in zip(products, matrices, strict=bool(products)):
                held = self.copy(rank, product)
                self.checks.append(lambda held=held, want=full @ matrix: _same(held, want))
            if seen is not None:
                self.checks.append(lambda seen=seen: _same(seen, full))

    def scatter(self, seed: int, rows: int, n: int, inner: Sequence[int]) -> None:
        """Queues one reduce-scatter on every rank."""
        operands = [
            [
                (integers(rows * self.size, k, seed=9 * seed + r), integers(k, n, seed=9 * seed + 5 + r + k))
                for k in inner
            ]
            for r in range(self.size)
        ]
        total = sum(a @ b for products in operands for a, b in products)
        for rank in range(self.size):
            products = [(a.clone(), b.clone()) for a, b in operands[rank]]
            with self.on(rank) as backend:
                out = backend.matmul_reduce_scatter(products)
            held = self.copy(rank, out)
            want = total[rank * rows : (rank + 1) * rows]
            self.checks.append(lambda held=held, want=want: _same(held, want))

    def finish(self, seed: int, ahead: int | None = None) -> None:
        self.machine.run(seed, ahead=ahead)
        for check in self.checks:
            check()
        self.checks.clear()


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want)


@contextmanager
def sizes(*, split: bool) -> Iterator[None]:
    """Whether operations count as large enough to be cut, in eager code too."""
    with (
        mock.patch.object(copy_engine, "_TILE", 1 if split else 1 << 40),
        mock.patch.object(copy_engine, "_EAGER_FLOP", 0.0 if split else math.inf),
    ):
        yield


def program(ranks: Ranks, seed: int = 0) -> None:
    """A layer forward and backward, and odd shapes; more operations than there are slots."""
    ranks.gather(seed + 1, 4, 6, [5], whole=True)
    ranks.scatter(seed + 2, 3, 7, [4])
    ranks.gather(seed + 3, 2, 3, [2, 4], transposed=True)
    ranks.gather(seed + 4, 2, 5, [3], whole=True, multiply=False)
    ranks.scatter(seed + 5, 1, 2, [3, 1, 2])
    ranks.scatter(seed + 6, 5, 4, [2, 2])
    ranks.gather(seed + 7, 3, 4, [3, 3, 1], whole=True)
    ranks.gather(seed + 8, 3, 12, [3, 2], columns=True)
    ranks.gather(seed + 9, 2, 12, [3], whole=True, columns=True, multiply=False)
    ranks.gather(seed + 10, 3, 12, [3, 2], whole=True, columns=True, known=True)
    ranks.gather(seed + 11, 2, 5, [3], known=True)
    ranks.gather(seed + 12, 2, 3, [2, 4], transposed=True, known=True)
    ranks.scatter(seed + 13, 2, 3, [4])


def capture(ranks: Ranks, queue: Callable[[], None]) -> list[Graph]:
    for driver in ranks.drivers:
        driver.begin_capture()
    queue()
    return [driver.end_capture() for driver in ranks.drivers]

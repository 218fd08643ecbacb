"""The two operations of `CopyEngineBackend`: one all-gather under its GEMMs, one reduce-scatter under its own.

They queue; the backend knows the streams, events and signals. Its notes say why things come in the order they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gtp.errors import GTPStateError
from gtp.ops.collective_backends.base import Factor, Gathering
from gtp.ops.collective_backends.collective import multiply, sum_of_products
from gtp.ops.collective_backends.workspace import Slot

if TYPE_CHECKING:
    from gtp.ops.collective_backends.copy_engine import CopyEngineBackend


class CopyEngineGathering(Gathering):
    """One all-gather. Peers' rows lie in the slot; this rank's own are multiplied where they are."""

    def __init__(self, backend: CopyEngineBackend, rows: torch.Tensor, whole: bool, columns: bool) -> None:
        self._backend = backend
        self._rows = rows
        # What travels is memory as it lies. Of a transpose, every block is one, and their products go one by one.
        self._transposed = not rows.is_contiguous()
        self._whole = whole
        self._with_columns = columns
        self._steps = list(range(1, backend.size))
        self._locally = False  # whether there are copies on the stream of local ones

    def __enter__(self) -> CopyEngineGathering:
        self._slot = self._backend.begin(self._rows.nbytes * self._backend.size)
        try:
            self._start()
        except BaseException:
            self._backend.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # also after an error, which most likely is one on every rank: the peers' copies are on their way, and flags
        # must not be left in the middle of something
        try:
            self.finish()
        finally:
            self._backend.end()

    def _start(self) -> None:
        backend, rows = self._backend, self._rows
        memory = rows.t() if self._transposed else rows
        blocks = self._slot.blocks((backend.size, *memory.shape), rows.dtype)
        self._blocks = blocks.transpose(1, 2) if self._transposed else blocks
        if self._with_columns:
            self._columns = rows.new_empty(rows.shape[0] * backend.size, rows.shape[1] // backend.size)
        backend.fork(backend.started, backend.lane)
        for step in self._steps:
            backend.send(self._slot, step, memory)
        if self._whole or self._with_columns:
            backend.driver.wait_event(backend.side, backend.started)
            self._locally = True
        if self._whole:
            self._copy_own_rows()
        if self._with_columns:
            self._copy_columns(backend.rank, rows.data_ptr())

    def matmul(self, factors: Sequence[Factor]) -> list[torch.Tensor]:
        backend, rows = self._backend, self._rows
        count = rows.shape[0]
        outs = [
            rows.new_empty(count * backend.size, factor.matrix.shape[1]) if factor.out is None else factor.out
            for factor in factors
        ]
        width = sum(factor.matrix.shape[1] for factor in factors)
        if not self._transposed and not backend.worth_cutting(count, width):
            full = self._gathered()
            for factor, out in zip(factors, outs, strict=True):
                multiply(full, factor.matrix, factor.bias, out)
            return outs

        def block(rank: int, source: torch.Tensor) -> None:
            for factor, out in zip(factors, outs, strict=True):
                multiply(source, factor.matrix, factor.bias, out.narrow(0, rank * count, count))

        block(backend.rank, rows)
        while self._steps:
            peer = self._receive()
            block(peer, self._blocks[peer])
        return outs

    def full(self) -> torch.Tensor:
        if not self._whole:
            raise GTPStateError("gathered rows were asked for, and the gathering was not started with whole=True")
        return self._gathered()

    def columns(self) -> torch.Tensor:
        if not self._with_columns:
            raise GTPStateError("columns were asked for, and the gathering was not started with columns=True")
        return self._columns

    def finish(self) -> None:
        """The slot is free for the peers; operands and copy streams are free for whatever comes next."""
        self._receive_all()
        self._join_local_copies()
        self._backend.release(self._slot)

    def _gathered(self) -> torch.Tensor:
        self._receive_all()
        if not self._whole:
            self._backend.fork(self._backend.started, self._backend.side)
            self._copy_own_rows()
            self._whole = True
        self._join_local_copies()
        return self._blocks.flatten(0, 1)

    def _receive_all(self) -> None:
        while self._steps:
            self._receive()

    def _receive(self) -> int:
        """The next peer, whose rows are there in the order of the current stream."""
        backend, step = self._backend, self._steps.pop(0)
        peer = backend.receive(step)
        if self._with_columns:
            backend.driver.wait_event(backend.side, backend.arrived[step - 1])
            self._copy_columns(peer, self._blocks[peer].data_ptr())
        return peer

    def _copy_own_rows(self) -> None:
        backend, own = self._backend, self._blocks[self._backend.rank]
        backend.driver.copy(own.data_ptr(), self._rows.data_ptr(), self._rows.nbytes, backend.side)
        self._locally = True

    def _copy_columns(self, rank: int, source: int) -> None:
        """A rank's rows, this rank's columns of them. No kernel: those of torch are slow at it and take SMs."""
        backend, (rows, k) = self._backend, self._rows.shape
        width, pitch = self._columns[0].nbytes, k * self._rows.element_size()
        target = self._columns.data_ptr() + rank * rows * width
        backend.driver.copy_rows(target, width, source + backend.rank * width, pitch, width, rows, backend.side)

    def _join_local_copies(self) -> None:
        if self._locally:
            self._backend.join(self._backend.local, self._backend.side)
            self._locally = False


class CopyEngineScattering:
    """One reduce-scatter. Peers' products for this rank's rows arrive in the slot."""

    def __init__(
        self,
        backend: CopyEngineBackend,
        slot: Slot,
        products: Sequence[tuple[torch.Tensor, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        self._backend = backend
        self._slot = slot
        self._products = products
        self._out = out
        self._blocks = slot.blocks((backend.size, *out.shape), out.dtype)
        self._unsent = list(range(1, backend.size))
        self._missing = list(range(1, backend.size))

    def run(self) -> None:
        """Computes, sends, receives and adds; `out` is complete in the order of the current stream."""
        backend, blocks, out = self._backend, self._blocks, self._out
        try:
            # kept until the copies have joined: nothing else may get this memory before
            sent = out.new_empty(backend.size - 1, *out.shape)
            while self._unsent:
                step = self._unsent[0]
                product = sent[step - 1]
                self._multiply((backend.rank + step) % backend.size, product)
                self._send(product)
            self._multiply(backend.rank, blocks[backend.rank])
            self._receive_all()
            add_blocks(blocks, out)
        finally:
            self._finish()

    def _finish(self) -> None:
        """The slot is free for the peers, and flags are as they were.

        Also after an error, which most likely is one on every rank. Peers still get what they wait for: of a rank that
        failed alone not-a-numbers, which nobody takes for a result.
        """
        if self._unsent:
            spare = self._blocks[self._backend.rank]
            spoil(spare)
            while self._unsent:
                self._send(spare)
        self._receive_all()
        self._backend.release(self._slot)

    def _send(self, block: torch.Tensor) -> None:
        backend, step = self._backend, self._unsent.pop(0)
        backend.fork(backend.computed[step - 1], backend.lane)
        backend.send(self._slot, step, block)

    def _receive_all(self) -> None:
        while self._missing:
            self._backend.receive(self._missing.pop(0))

    def _multiply(self, rank: int, into: torch.Tensor) -> None:
        """The product of a rank's rows."""
        count = self._out.shape[0]
        sum_of_products([(a.narrow(0, rank * count, count), b) for a, b in self._products], out=into)


def spoil(block: torch.Tensor) -> None:
    """Nothing that is computed from it can be taken for a result."""
    block.fill_(float("nan"))


def add_blocks(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """`out = sum of blocks`, in fp32 for narrower dtypes, rounded once."""
    if blocks.shape[0] == 2:
        torch.add(blocks[0], blocks[1], out=out)
    else:
        torch.sum(blocks, dim=0, out=out)

"""The operations of `CopyEngineBackend`: an all-gather under its GEMMs, a reduce-scatter under its own or after one.

They queue; the backend knows the streams, events and signals. Its notes say why things come in the order they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gtp.errors import GTPStateError
from gtp.ops.collective_backends.base import Factor, Gathering
from gtp.ops.collective_backends.collective import multiply, sum_of_products
from gtp.ops.collective_backends.workspace import Blocks, Slot

if TYPE_CHECKING:
    from gtp.ops.collective_backends.copy_engine import CopyEngineBackend


class CopyEngineGathering(Gathering):
    """One all-gather. Peers' rows lie in the slot; this rank's own are multiplied where they are, or copied beside."""

    def __init__(self, backend: CopyEngineBackend, rows: torch.Tensor, whole: bool, columns: bool, width: int) -> None:
        self._backend = backend
        self._rows = rows
        # What travels is memory as it lies. Of a transpose, every block is one, and their products go one by one.
        self._transposed = not rows.is_contiguous()
        self._whole = whole
        self._with_columns = columns
        self._width = width
        self._full: torch.Tensor | None = None  # once it is complete in the order of the current stream
        self._next = 1  # the step whose rows come next
        self._large = self._cut = False
        self._own_rows_aside = False  # whether their copy is on the stream of local ones
        self._columns_copied = False  # from as many ranks' rows as have come
        self._locally = False  # whether there are copies on the stream of local ones that nobody has waited for

    def __enter__(self) -> CopyEngineGathering:
        backend, rows = self._backend, self._rows
        address, nbytes, size = rows.data_ptr(), rows.nbytes, backend.size
        slot = self._slot = backend.begin(nbytes * size)
        try:
            if self._with_columns:
                # before the fork: other streams write it, and must come after whoever had this memory before
                self._columns = rows.new_empty(rows.shape[0] * size, rows.shape[1] // size)
            if self._is_short():
                backend.exchange(slot, address, 0, nbytes, own=not self._transposed)
                self._next = size
                if not self._transposed:
                    self._full = self._blocks().joined
            else:
                backend.fork(backend.started, backend.lane)
                for step in range(1, size):
                    backend.send(slot, step, address, nbytes)
        except BaseException:
            backend.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # also after an error, which most likely is one on every rank: the peers' copies are on their way, and flags
        # must not be left in the middle of something
        try:
            self.finish()
        finally:
            self._backend.end()

    def matmul(self, factors: Sequence[Factor]) -> list[torch.Tensor]:
        backend, rows = self._backend, self._rows
        count, k = rows.shape
        width = sum([factor.matrix.shape[1] for factor in factors])
        self._large = self._next == 1 and backend.worth_cutting(count, k, width)
        self._cut = self._large or self._transposed
        if not self._cut:
            full = self._gathered()
            if self._with_columns and not self._columns_copied:
                self._copy_all_columns()
            return [multiply(full, factor.matrix, factor.bias, factor.out) for factor in factors]
        outs = [
            rows.new_empty(count * backend.size, factor.matrix.shape[1]) if factor.out is None else factor.out
            for factor in factors
        ]

        def block(rank: int, source: torch.Tensor) -> None:
            for factor, out in zip(factors, outs, strict=True):
                multiply(source, factor.matrix, factor.bias, out.narrow(0, rank * count, count))

        self._begin_local_copies()
        block(backend.rank, rows)
        blocks = self._blocks().each
        for step in range(1, backend.size):
            peer = self._receive(step)
            block(peer, blocks[peer])
        return outs

    def full(self) -> torch.Tensor:
        if not self._whole:
            raise GTPStateError("gathered rows were asked for, and the gathering was not started with whole=True")
        return self._gathered()

    def columns(self) -> torch.Tensor:
        if not self._with_columns:
            raise GTPStateError("columns were asked for, and the gathering was not started with columns=True")
        if not self._columns_copied:
            self._gathered()
            self._copy_all_columns()
        return self._columns

    def finish(self) -> None:
        """The slot is free for the peers; operands and copy streams are free for whatever comes next."""
        if self._next < self._backend.size:
            self._receive_all()
        if self._locally:
            self._join_local_copies()
        self._backend.release(self._slot, aside=self._large)

    def _is_short(self) -> bool:
        """Whether nothing is to be done beside the copies, so that the current stream can make them."""
        if self._backend.captured or not self._width:
            return False
        count, k = self._rows.shape
        return not self._backend.worth_cutting(count, k, self._width)

    def _blocks(self) -> Blocks:
        count, k = self._rows.shape
        return self._slot.blocks(count, k, self._rows.dtype, transposed=self._transposed)

    def _gathered(self) -> torch.Tensor:
        if self._full is None:
            if not self._own_rows_aside:
                # the current stream would only wait here
                self._copy_own_rows(self._backend.stream)
            if self._next < self._backend.size:
                self._receive_all()
            self._join_local_copies()
            self._full = self._blocks().joined
        return self._full

    def _begin_local_copies(self) -> None:
        """What is wanted of this rank's own rows, beside the GEMM of those."""
        backend = self._backend
        if self._whole or self._with_columns:
            backend.driver.wait_event(backend.side, backend.started)
            self._locally = True
        if self._whole and self._full is None:
            self._copy_own_rows(backend.side)
            self._own_rows_aside = True
        if self._with_columns:
            self._copy_columns(backend.rank, self._rows.data_ptr(), 1)

    def _receive_all(self) -> None:
        size = self._backend.size
        if self._with_columns and self._cut:
            for step in range(self._next, size):
                self._receive(step)
        else:
            self._backend.receive(size - 1)  # the lane is in order: all others have come then
        self._next = size

    def _receive(self, step: int) -> int:
        """The peer of a step, whose rows are there in the order of the current stream. Steps in order."""
        backend = self._backend
        if step < self._next:
            return (backend.rank - step) % backend.size
        self._next = step + 1
        peer = backend.receive(step)
        if self._with_columns:
            backend.driver.wait_event(backend.side, backend.arrived[step])
            self._copy_columns(peer, self._slot.pointers[backend.rank] + peer * self._rows.nbytes, 1)
        return peer

    def _copy_own_rows(self, stream: int) -> None:
        rows, rank = self._rows, self._backend.rank
        nbytes = rows.nbytes
        self._backend.driver.copy(self._slot.pointers[rank] + rank * nbytes, rows.data_ptr(), nbytes, stream)

    def _copy_all_columns(self) -> None:
        """Of the rows that are together, beside what comes next on the current stream."""
        backend = self._backend
        backend.fork(backend.started, backend.side)
        self._locally = True
        self._copy_columns(0, self._slot.pointers[backend.rank], backend.size)

    def _copy_columns(self, first: int, source: int, ranks: int) -> None:
        """This rank's columns of some ranks' rows. No kernel: those of torch are slow at it and take SMs."""
        backend, (rows, k) = self._backend, self._rows.shape
        self._columns_copied = True
        pitch = k * self._rows.itemsize
        width = pitch // backend.size
        target = self._columns.data_ptr() + first * rows * width
        backend.driver.copy_rows(target, width, source + backend.rank * width, pitch, width, rows * ranks, backend.side)

    def _join_local_copies(self) -> None:
        if self._locally:
            self._backend.join(self._backend.local, self._backend.side)
            self._locally = False


class CopyEngineScattering:
    """One reduce-scatter in parts, each sent while the next is computed. Peers' products for this rank's rows arrive
    in the slot."""

    def __init__(
        self, backend: CopyEngineBackend, slot: Slot, products: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._backend = backend
        self._slot = slot
        self._products = products
        a, b = products[0]
        self._count = a.shape[0] // backend.size
        self._blocks = slot.blocks(self._count, b.shape[1], a.dtype)
        self._next = 1  # the step that was not sent yet
        self._missing = True

    def run(self) -> torch.Tensor:
        """Computes, sends, receives and adds; the result is complete in the order of the current stream."""
        backend, blocks = self._backend, self._blocks
        sent = []  # kept until the copies have joined: nothing else may get this memory before
        try:
            while self._next < backend.size:
                sent.append(sum_of_products(self._operands((backend.rank + self._next) % backend.size)))
                self._send(sent[-1])
            sum_of_products(self._operands(backend.rank), out=blocks.each[backend.rank])
            self._receive_all()
            return sum_of_blocks(blocks)
        finally:
            self._finish()

    def _finish(self) -> None:
        """The slot is free for the peers, and flags are as they were.

        Also after an error, which most likely is one on every rank. Peers still get what they wait for: of a rank that
        failed alone not-a-numbers, which nobody takes for a result.
        """
        if self._next < self._backend.size:
            spare = self._blocks.each[self._backend.rank]
            spoil(spare)
            while self._next < self._backend.size:
                self._send(spare)
        self._receive_all()
        self._backend.release(self._slot, aside=True)

    def _send(self, block: torch.Tensor) -> None:
        backend, step = self._backend, self._next
        self._next += 1
        backend.fork(backend.computed[step], backend.lane)
        backend.send(self._slot, step, block.data_ptr(), block.nbytes)

    def _receive_all(self) -> None:
        if self._missing:
            self._missing = False
            self._backend.receive(self._backend.size - 1)  # the lane is in order: all others have come then

    def _operands(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What gives the product of a rank's rows."""
        count = self._count
        return [(a.narrow(0, rank * count, count), b) for a, b in self._products]


def scatter_in_one(
    backend: CopyEngineBackend, slot: Slot, products: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """One reduce-scatter in the order of the current stream: the product of all rows, then its blocks.

    After an error, peers still get what they wait for. See `CopyEngineScattering`.
    """
    rank, size = backend.rank, backend.size
    a, b = products[0]
    count = a.shape[0] // size
    blocks = slot.blocks(count, b.shape[1], a.dtype)
    nbytes = count * b.shape[1] * a.itemsize
    sent = False
    try:
        product = sum_of_products(products)
        sent = True
        if size == 2:
            backend.exchange(slot, product.data_ptr(), nbytes, nbytes, own=False)
            return add(product.narrow(0, rank * count, count), blocks.each[1 - rank])
        backend.exchange(slot, product.data_ptr(), nbytes, nbytes, own=True)
        return sum_of_blocks(blocks)
    finally:
        if not sent:
            spare = blocks.each[rank]
            spoil(spare)
            backend.exchange(slot, spare.data_ptr(), 0, nbytes, own=False)
        backend.release(slot, aside=False)


def spoil(block: torch.Tensor) -> None:
    """Nothing that is computed from it can be taken for a result."""
    block.fill_(float("nan"))


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Their sum, in fp32 for narrower dtypes, rounded once."""
    return torch.add(one, other)


def sum_of_blocks(blocks: Blocks) -> torch.Tensor:
    """Likewise, of all ranks' blocks."""
    each = blocks.each
    return torch.add(each[0], each[1]) if len(each) == 2 else torch.sum(blocks.stacked, dim=0)

"""`CopyEngineBackend`: peer copies under a split GEMM. No kernel spins, and copies take no SM from the GEMM.

All-gather, then multiply. Every rank pushes its rows into each peer's slot while it multiplies its own rows; then it
multiplies the others' rows, in the order in which they come. Multiply, then reduce-scatter. Every rank multiplies the
others' rows first and pushes each product to its owner while it computes the next; its own rows come last, and what the
peers sent is added to them. `Workspace` says how ranks know what is there and what is free.

[Note: one operation, one fork and join] Copy streams fork from the current stream when an operation begins, and join it
when the operation ends. So whatever is queued on the current stream afterwards, an allocator's reuse of an operand or a
replay of a captured graph included, is ordered after all of it, and nothing is in flight between operations but the
peers' consent to send again.

[Note: no deadlock between branches] Streams that look independent may share a hardware queue, and a graph may put
independent branches in any order, so a wait for a peer may hold back a copy that another peer waits for. Therefore the
wait for what arrives at one step comes after this rank's own copies of that step have been made, in every order that
the dependencies allow. A rank held at a step then waits for a rank held at an earlier step, and that chain ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError
from gtp.ops.collective_backends.base import Factor, Gathering, GemmBackend
from gtp.ops.collective_backends.collective import Gathered, multiply, sum_of_products
from gtp.ops.collective_backends.workspace import CHUNKS, ArenaFactory, Slot, Workspace
from gtp.ops.peer import Arena, CudaDriver, Driver, SymmetricArena

_TWO_STREAMS = 1 << 20  # bytes of a block from which on two streams copy it
_TILE = 128 * 128  # elements of a product that one SM computes at a time, or more


class CopyEngineBackend(GemmBackend):
    """See the module's header. For groups inside one NVLink domain; `gtp.ops.peer.why_not` tells.

    Products are rounded once to the operands' dtype, which is also what travels. Of two ranks, the other's product is
    added inside the GEMM's accumulator where the operation is large enough to be cut in two, otherwise after it; of
    more, all are added in fp32 and rounded once.

    The workspace grows to the largest operation and stays. Growing is collective, synchronizes, and cannot happen while
    a CUDA graph is captured: run the largest size once before. Graphs that were captured before it grew stay right,
    because what they use is kept.

    Args:
        process_group: The tensor-parallel group.
        device: This rank's GPU.
        debug: See `GemmBackend`.
        driver, make_arena: What to run on, for tests: `CudaDriver` and `SymmetricArena` otherwise.
    """

    name = "copy_engine"
    gathers_under_matmul = True

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        *,
        debug: bool = False,
        driver: Driver | None = None,
        make_arena: ArenaFactory | None = None,
    ) -> None:
        super().__init__(process_group, debug=debug)
        self._group = process_group
        self._device = device
        self.driver: Driver = CudaDriver(device) if driver is None else driver
        self._make_arena = make_arena or self._symmetric
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.lanes = tuple(self.driver.new_stream() for _ in range(CHUNKS))
        self.local_copies = self.driver.new_stream()
        self.fork_event, self.local_event = self.driver.new_event(), self.driver.new_event()
        # per step and lane; a step is one block to the peer that many ranks above, and one from as many below
        self.sent = [[self.driver.new_event() for _ in range(CHUNKS)] for _ in range(1, self.size)]
        self._workspace: Workspace | None = None
        self._kept: list[Workspace] = []
        self._busy = False

    def reserve(self, nbytes: int) -> None:
        """Makes room for operations whose gathered rows, or unreduced products, are up to `nbytes`. Collective.

        Raises:
            GTPStateError: while a CUDA graph is captured.
        """
        if self._workspace is not None and self._workspace.capacity >= nbytes:
            return
        if self.driver.capture():
            have = 0 if self._workspace is None else self._workspace.capacity
            raise GTPStateError(
                f"tp_gemm_backend='copy_engine': this call needs a workspace of {nbytes} bytes and there are {have}; "
                "it cannot grow while a CUDA graph is captured. Run forward and backward once at the largest size "
                "before the capture, or call reserve() on the backend"
            )
        old, self._workspace = self._workspace, Workspace(self.driver, self._group, nbytes, self._make_arena)
        if old is not None and old.captured:
            self._kept.append(old)

    @contextmanager
    def gather(self, rows: torch.Tensor, *, whole: bool) -> Iterator[Gathering]:
        self.agree(f"gather {tuple(rows.shape)} {rows.dtype}")
        if not rows.numel():
            yield Gathered(rows.new_empty(rows.shape[0] * self.size, rows.shape[1]), None)
            return
        with self._operation(rows.nbytes * self.size) as slot:
            gathering = _Gathering(self, slot, rows, whole)
            try:
                yield gathering
            finally:
                # also after an error, which most likely is one on every rank: the peers' copies are on their way, and
                # flags must not be left in the middle of something
                gathering.finish()

    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        a, b = products[0]
        self.agree(f"reduce-scatter {(a.shape[0], b.shape[1])} {a.dtype}")
        out = a.new_empty(a.shape[0] // self.size, b.shape[1])
        if not out.numel():
            return out
        with self._operation(out.nbytes * self.size) as slot:
            _Scattering(self, slot, products, out).run()
        return out

    def fills_the_gpu(self, *shape: int) -> bool:
        """Whether a product of this shape has work for every SM, so that cutting a larger one there costs little."""
        return math.prod(shape) >= self._sms * _TILE

    def chunks_for(self, nbytes: int) -> int:
        """Into how many chunks a block of so many bytes is cut. Every rank says the same."""
        return CHUNKS if nbytes >= _TWO_STREAMS else 1

    def fork(self, *streams: int) -> None:
        """Streams go on after what the current stream has so far."""
        self.driver.record(self.fork_event, self.driver.current_stream())
        for stream in streams:
            self.driver.wait_event(stream, self.fork_event)

    def send(self, slot: Slot, step: int, block: torch.Tensor, chunk: int, rows: tuple[int, int]) -> None:
        """Queues one chunk of this rank's block to the peer of a step; its lane has forked already."""
        driver, lane = self.driver, self.lanes[chunk]
        peer = (self.rank + step) % self.size
        driver.submit(slot.reclaim[chunk][peer], lane)
        start, stop = rows
        if stop > start:
            row_bytes = block.nbytes // block.shape[0]
            at = start * row_bytes
            target = slot.pointers[peer] + self.rank * block.nbytes + at
            driver.copy(target, block.data_ptr() + at, (stop - start) * row_bytes, lane)
        driver.submit(slot.post[chunk][peer], lane)
        driver.record(self.sent[step - 1][chunk], lane)

    def receive(self, slot: Slot, step: int, chunks: Sequence[int]) -> int:
        """Holds the current stream until these chunks from the peer of a step are there. Returns the peer.

        See [Note: no deadlock between branches]; it also joins the lanes.
        """
        driver, current = self.driver, self.driver.current_stream()
        peer = (self.rank - step) % self.size
        for chunk in chunks:
            driver.wait_event(current, self.sent[step - 1][chunk])
        driver.submit(slot.arrived[tuple(chunks)][peer], current)
        return peer

    def release(self, slot: Slot, chunks: int) -> None:
        """The slot is free for the peers, in the order of the current stream."""
        self.driver.submit(slot.release[chunks], self.driver.current_stream())

    @contextmanager
    def _operation(self, nbytes: int) -> Iterator[Slot]:
        if self._busy:
            raise GTPStateError(
                "tp_gemm_backend='copy_engine': a collective GEMM was started inside another one over the same backend"
            )
        self.reserve(nbytes)
        workspace = self._workspace
        assert workspace is not None
        if self.driver.capture():
            workspace.captured = True
        self._busy = True
        try:
            yield workspace.next_slot()
        finally:
            self._busy = False

    def _symmetric(self, nbytes: int, process_group: dist.ProcessGroup) -> Arena:
        return SymmetricArena(nbytes, process_group, self._device)


def chunk_rows(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Start and stop of each chunk's rows; the last may be shorter or empty."""
    step = -(-rows // chunks)
    return [(min(c * step, rows), min((c + 1) * step, rows)) for c in range(chunks)]


class _Gathering(Gathering):
    """One all-gather. Peers' rows lie in the slot; this rank's own are multiplied where they are."""

    def __init__(self, backend: CopyEngineBackend, slot: Slot, rows: torch.Tensor, whole: bool) -> None:
        self._backend = backend
        self._slot = slot
        # What travels is memory as it lies. Of a transpose, every block is one, and their products go one by one.
        self._transposed = not rows.is_contiguous()
        self._rows = rows
        self._whole = whole
        memory = rows.t() if self._transposed else rows
        blocks = slot.blocks((backend.size, *memory.shape), rows.dtype)
        self._blocks = blocks.transpose(1, 2) if self._transposed else blocks
        self._chunks = range(backend.chunks_for(rows.nbytes))
        self._steps = list(range(1, backend.size))
        self._copied_locally = False
        if whole:
            self._copy_own_rows()
        backend.fork(*backend.lanes[: len(self._chunks)])
        spans = chunk_rows(memory.shape[0], len(self._chunks))
        for step in self._steps:
            for chunk in self._chunks:
                backend.send(slot, step, memory, chunk, spans[chunk])

    def matmul(self, factors: Sequence[Factor]) -> list[torch.Tensor]:
        backend, rows = self._backend, self._rows
        count = rows.shape[0]
        outs = [
            rows.new_empty(count * backend.size, factor.matrix.shape[1]) if factor.out is None else factor.out
            for factor in factors
        ]
        width = sum(factor.matrix.shape[1] for factor in factors)
        if not self._transposed and not backend.fills_the_gpu(count, width):
            full = self._gathered()
            for factor, out in zip(factors, outs, strict=True):
                multiply(full, factor.matrix, factor.bias, out)
            return outs

        def block(rank: int, source: torch.Tensor) -> None:
            for factor, out in zip(factors, outs, strict=True):
                multiply(source, factor.matrix, factor.bias, out.narrow(0, rank * count, count))

        block(backend.rank, rows)
        while self._steps:
            peer = backend.receive(self._slot, self._steps.pop(0), self._chunks)
            block(peer, self._blocks[peer])
        return outs

    def full(self) -> torch.Tensor:
        if not self._whole:
            raise GTPStateError("gathered rows were asked for, and the gathering was not started with whole=True")
        return self._gathered()

    def finish(self) -> None:
        """The slot is free for the peers; operands and copy streams are free for whatever comes next."""
        self._receive_all()
        self._backend.release(self._slot, len(self._chunks))
        self._join_own_rows()

    def _gathered(self) -> torch.Tensor:
        self._receive_all()
        if not self._copied_locally:
            self._copy_own_rows()
        self._join_own_rows()
        return self._blocks.flatten(0, 1)

    def _receive_all(self) -> None:
        while self._steps:
            self._backend.receive(self._slot, self._steps.pop(0), self._chunks)

    def _copy_own_rows(self) -> None:
        backend, own = self._backend, self._blocks[self._backend.rank]
        self._copied_locally = True
        backend.fork(backend.local_copies)
        backend.driver.copy(own.data_ptr(), self._rows.data_ptr(), self._rows.nbytes, backend.local_copies)
        backend.driver.record(backend.local_event, backend.local_copies)

    def _join_own_rows(self) -> None:
        if self._copied_locally:
            self._backend.driver.wait_event(self._backend.driver.current_stream(), self._backend.local_event)


class _Scattering:
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
        self._chunks = range(backend.chunks_for(out.nbytes))
        self._spans = chunk_rows(out.shape[0], len(self._chunks))
        # Of two ranks, chunks are products of their own: the peer's first half arrives while this rank computes its
        # second, and is added in the accumulator of this rank's own first half.
        start, stop = self._spans[0]
        large = backend.fills_the_gpu(stop - start, out.shape[1])
        self._halves = backend.size == 2 and len(self._chunks) > 1 and large

    def run(self) -> None:
        """Computes, sends, receives and adds; `out` is complete in the order of the current stream."""
        backend = self._backend
        # kept until the copies have joined: nothing else may get this memory before
        sent = self._out.new_empty(backend.size - 1, *self._out.shape)
        for step in range(1, backend.size):
            peer, product = (backend.rank + step) % backend.size, sent[step - 1]
            for chunks in [[c] for c in self._chunks] if self._halves else [list(self._chunks)]:
                self._multiply(peer, (self._spans[chunks[0]][0], self._spans[chunks[-1]][1]), product)
                backend.fork(*(backend.lanes[chunk] for chunk in chunks))
                for chunk in chunks:
                    backend.send(self._slot, step, product, chunk, self._spans[chunk])
        if self._halves:
            self._own_rows_on_top()
        else:
            self._own_rows_and_sum()
        backend.release(self._slot, len(self._chunks))

    def _multiply(self, rank: int, span: tuple[int, int], into: torch.Tensor) -> None:
        """The product of some of a rank's rows, into the same rows of `into`."""
        sum_of_products(self._operands(rank, span), out=into[slice(*span)])

    def _operands(self, rank: int, span: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        first, count = rank * self._out.shape[0] + span[0], span[1] - span[0]
        return [(a.narrow(0, first, count), b) for a, b in self._products]

    def _own_rows_on_top(self) -> None:
        """Two ranks: `out = peer's product + own rows' product`, chunk by chunk, inside the accumulator."""
        for chunk, span in enumerate(self._spans):
            peer = self._backend.receive(self._slot, 1, [chunk])
            out, total = self._out[slice(*span)], self._blocks[peer, slice(*span)]
            for a, b in self._operands(self._backend.rank, span):
                add_product(total, a, b, out)
                total = out

    def _own_rows_and_sum(self) -> None:
        """`out = sum over ranks of their products`, own rows last, in rank order."""
        self._multiply(self._backend.rank, (0, self._out.shape[0]), self._blocks[self._backend.rank])
        for step in range(1, self._backend.size):
            self._backend.receive(self._slot, step, self._chunks)
        add_blocks(self._blocks, self._out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """`out = total + a @ b`, rounded once."""
    torch.addmm(total, a, b, out=out)


def add_blocks(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """`out = sum of blocks`, in fp32 for narrower dtypes, rounded once."""
    if blocks.shape[0] == 2:
        torch.add(blocks[0], blocks[1], out=out)
    else:
        torch.sum(blocks, dim=0, out=out)

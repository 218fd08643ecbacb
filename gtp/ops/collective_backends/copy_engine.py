"""`CopyEngineBackend`: peer copies under a split GEMM. No kernel spins, and copies take no SM from the GEMM.

All-gather, then multiply. Every rank pushes its rows into each peer's slot while it multiplies its own rows; then it
multiplies the others' rows, in the order in which they come. Multiply, then reduce-scatter. Every rank multiplies the
others' rows first and pushes each product to its owner while it computes the next; its own rows come last, and then all
that is for them is added. `Workspace` says how ranks know what is there and what is free.

[Note: as few parts as there are ranks] Measured on H200s: halves of a product take 1% longer than the whole, quarters
10%, so finer parts cost more than the addition that they could take into a GEMM. Parts on two streams in turn, to fill
the SMs that a part leaves, take 2% to 5% longer than parts on one: two GEMMs at once fight for the cache.

[Note: short products in eager code] The host takes about 0.12 ms to queue an operation in parts, and a product of
8e10 floating-point operations takes an H200 as long. With a shorter one the GPU waits for the host, and what parts hide
is less than what queueing them costs: a GEMM more per peer, views, events. So eager code multiplies all rows at once.
It sends a short product's blocks on the current stream itself, where order costs no events. In a graph the host does
not matter, and parts are faster. (cuBLAS adds along K in one order, however rows are cut, where it does not split K.)

[Note: one operation, one fork and join] Other streams fork from the current stream when an operation begins, and it
joins them when the operation ends. So whatever is queued on the current stream afterwards, an allocator's reuse of an
operand or a replay of a captured graph included, is ordered after all of it. Nothing is in flight between operations
but consent to send again: this rank's to its peers, which no later work of this rank waits for, and theirs.

[Note: no deadlock between branches] Streams that look independent may share a hardware queue, and a graph may put
independent branches in any order, so a wait for a peer may hold back a copy that another peer waits for. Therefore all
copies go on one stream, the lane, and so do the waits for what arrives: that of one step comes after this rank's own
copy of the next, and that of the last step after all. A rank held at a step then waits for a rank held at an earlier
step, and that chain ends. So it does where all steps are one, on the current stream: who waits for blocks has posted
its own, and who waits for consent waits for the end of an earlier operation. On the lane a wait also ends while the
current stream still multiplies. On the current stream, whose GEMM comes next, its signals took 10 to 30 us in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError
from gtp.ops.collective_backends.base import Gathering, GemmBackend
from gtp.ops.collective_backends.collective import Gathered
from gtp.ops.collective_backends.copy_engine_operations import (
    CopyEngineGathering,
    CopyEngineScattering,
    scatter_in_one,
)
from gtp.ops.collective_backends.workspace import Slot, Workspace
from gtp.ops.peer import Arena, ArenaFactory, CudaDriver, Driver, SymmetricArena, Watchdog

_TILE = 64 * 64  # elements of a product, per SM, from which it is a GEMM of its own
_EAGER_FLOP = 8e10  # of a rank's product, from which eager code cuts it: see [Note: short products in eager code]
_ADVICE: Final = (
    "all ranks of a tensor-parallel group must run the same collective GEMMs in the same order. "
    "gtp.ops.gemm_backend(peer_timeout=...) sets the time"
)


class CopyEngineBackend(GemmBackend):
    """See the module's header. For groups inside one NVLink domain; `gtp.ops.peer.why_not` tells.

    Products are rounded once to the operands' dtype, which is also what travels; over ranks they are added in fp32 and
    rounded once. Of two ranks, that is where NCCL rounds too.

    The workspace grows to the largest operation and stays. Growing is collective, synchronizes, and cannot happen while
    a CUDA graph is captured: run the largest size once before. Graphs that were captured before it grew stay right,
    because what they use is kept.

    Operations of one backend share its streams and its workspace: they belong on one stream, or on streams that wait
    for each other.

    Args:
        process_group: The tensor-parallel group.
        device: This rank's GPU.
        debug: See `GemmBackend`.
        peer_timeout: Seconds that a stream may wait for another rank before that rank is reported: the next operation
            raises `PeerError`, and what was computed since is worthless.
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
        peer_timeout: float = 600.0,
        driver: Driver | None = None,
        make_arena: ArenaFactory | None = None,
    ) -> None:
        super().__init__(process_group, debug=debug)
        self._group = process_group
        self._device = device
        self.driver: Driver = CudaDriver(device) if driver is None else driver
        self._make_arena = make_arena or self._symmetric
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        new_stream, new_event = self.driver.new_stream, self.driver.new_event
        self.lane, self.side = new_stream(), new_stream()
        self.started, self.done, self.local = new_event(), new_event(), new_event()
        # by step, see `Slot`
        self.computed, self.arrived = ([new_event() for _ in range(self.size)] for _ in range(2))
        self._watchdog: Watchdog | None = None
        if device.type == "cuda":
            self._watchdog = Watchdog(device, peer_timeout, _ADVICE)
            self._watchdog.start()
        self._workspace: Workspace | None = None
        self._kept: list[Workspace] = []
        self._busy = False
        # of the operation that is under way: the stream that it began on, and whether a CUDA graph captures it
        self.stream, self.captured = 0, False

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
        watch = None if self._watchdog is None else self._watchdog.site
        old = self._workspace
        with torch.inference_mode(False):  # it serves training too
            self._workspace = Workspace(self.driver, self._group, nbytes, self._make_arena, watch)
        if old is not None and old.captured:
            self._kept.append(old)

    def gather(self, rows: torch.Tensor, *, whole: bool = False, columns: bool = False, width: int = 0) -> Gathering:
        self.agree("gather", rows.shape[0], rows.shape[1], rows)
        if not rows.numel():
            return Gathered(self, rows.new_empty(rows.shape[0] * self.size, rows.shape[1]), None)
        return CopyEngineGathering(self, rows, whole, columns, width)

    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        a, b = products[0]
        rows, columns = a.shape[0], b.shape[1]
        self.agree("reduce-scatter", rows, columns, a)
        if not (rows and columns):
            return a.new_empty(rows // self.size, columns)
        slot = self.begin(rows * columns * a.itemsize)
        try:
            if self.captured or 2.0 * rows * columns * sum([a.shape[1] for a, _ in products]) >= _EAGER_FLOP:
                return CopyEngineScattering(self, slot, products).run()
            return scatter_in_one(self, slot, products)
        finally:
            self.end()

    def begin(self, nbytes: int) -> Slot:
        """The slot of an operation; `end` must follow.

        Raises:
            PeerError: an earlier operation has waited too long for another rank.
        """
        if self._watchdog is not None:
            self._watchdog.check()
        if self._busy:
            raise GTPStateError(
                "tp_gemm_backend='copy_engine': a collective GEMM was started inside another one over the same backend"
            )
        workspace = self._workspace
        if workspace is None or workspace.capacity < nbytes:
            self.reserve(nbytes)
            workspace = self._workspace
            assert workspace is not None
        self.stream, self.captured = self.driver.current_stream(), bool(self.driver.capture())
        if self.captured:
            workspace.captured = True
        self._busy = True
        return workspace.next_slot()

    def end(self) -> None:
        self._busy = False

    def worth_cutting(self, rows: int, k: int, columns: int) -> bool:
        """Whether the product of a rank's rows, `[rows, k]` by `[k, columns]`, is to be a GEMM of its own.

        That it has work for a good part of the SMs, and see [Note: short products in eager code].
        """
        if rows * columns < self._sms * _TILE:
            return False
        return self.captured or 2.0 * self.size * rows * k * columns >= _EAGER_FLOP

    def fork(self, event: int, stream: int) -> None:
        """A stream goes on after what the current stream has so far."""
        self.driver.record(event, self.stream)
        self.driver.wait_event(stream, event)

    def join(self, event: int, stream: int) -> None:
        """The current stream goes on after what a stream has so far."""
        self.driver.record(event, stream)
        self.driver.wait_event(self.stream, event)

    def send(self, slot: Slot, step: int, block: int, nbytes: int) -> None:
        """Queues this rank's block at an address to the peer of a step; the lane has forked already. Steps in order.

        See [Note: no deadlock between branches] for where the lane waits.
        """
        driver, lane = self.driver, self.lane
        driver.submit(slot.reclaim[step], lane)
        driver.copy(slot.pointers[(self.rank + step) % self.size] + self.rank * nbytes, block, nbytes, lane)
        for batch, arrived in slot.posts[step]:
            driver.submit(batch, lane)
            if arrived is not None:
                driver.record(self.arrived[arrived], lane)

    def receive(self, step: int) -> int:
        """Holds the current stream until the block from the peer of a step is there, and joins the lane.

        Returns:
            The peer.
        """
        self.driver.wait_event(self.stream, self.arrived[step])
        return (self.rank - step) % self.size

    def exchange(self, slot: Slot, blocks: int, stride: int, nbytes: int, *, own: bool) -> None:
        """On the current stream, sends each peer its block, at an address and a stride per rank, and waits for theirs.

        `own`: this rank's own is put beside them.
        """
        driver, stream, mine = self.driver, self.stream, self.rank * nbytes
        driver.submit(slot.reclaim_all, stream)
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            driver.copy(slot.pointers[peer] + mine, blocks + peer * stride, nbytes, stream)
        if own:
            driver.copy(slot.pointers[self.rank] + mine, blocks + self.rank * stride, nbytes, stream)
        driver.submit(slot.exchange, stream)

    def release(self, slot: Slot, *, aside: bool) -> None:
        """The slot is free for the peers, in the order of the current stream.

        `aside`: what comes next on the current stream need not wait for that; a capture has to join it anyhow.
        """
        driver = self.driver
        if aside and not self.captured:
            self.fork(self.done, self.side)
            driver.submit(slot.release, self.side)
        else:
            driver.submit(slot.release, self.stream)

    def __del__(self) -> None:
        watchdog = getattr(self, "_watchdog", None)
        if watchdog is not None:
            watchdog.stop()

    def _symmetric(self, nbytes: int, process_group: dist.ProcessGroup) -> Arena:
        return SymmetricArena(nbytes, process_group, self._device)

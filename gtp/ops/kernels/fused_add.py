"""`FusedAdd`: adds what all ranks sent for a shard, in fp32, in rank order, and rounds once. Few SMs, little host time.

The kernel is bounded in SMs because it runs beside GEMMs: every SM it takes is one that a wave of the GEMM waits for.
It is a persistent loop over `programs` programs of one SM's worth of threads each.
"""

from __future__ import annotations

from typing import Any

import torch

from gtp.errors import GTPStateError, MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError(
        "gtp's copy-engine transport adds gradients with a Triton kernel, and the package triton is not installed: "
        "pip install triton"
    ) from error

BLOCK = 8192  # elements per program and turn: 16 a thread, two 16-byte loads per bf16 contribution
WARPS = 16
SHARED_BYTES = 200 << 10  # of an SM, for what is on its way


@triton.jit  # type: ignore[untyped-decorator]
def add_block(  # type: ignore[no-untyped-def]
    start,
    into,
    own,
    received,
    stride,
    count,
    factor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDE: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The elements from `start` on, of `fused_add_kernel`."""
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < count
    total = tl.zeros([BLOCK], WIDE)
    for source in tl.static_range(SIZE):
        if source == RANK:
            part = tl.load(own + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        else:
            place = received + (source - (source > RANK)) * stride
            part = tl.load(place + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        # not zero plus the first: that would turn a negative zero into a positive one
        total = part.to(WIDE) if source == 0 else total + part.to(WIDE)
    if SCALE:
        total *= factor
    elif DIVIDE:
        total = tl.div_rn(total, tl.full([BLOCK], factor, tl.float32)) if NARROW else total / factor
    if ACCUMULATE:
        total += tl.load(into + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(WIDE)
    tl.store(into + offsets, total.to(into.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def fused_add_kernel(  # type: ignore[no-untyped-def]
    into,  # [count]: receives the result
    own,  # [count]: this rank's contribution
    received,  # [SIZE - 1, stride]: the other ranks' contributions, by rank
    stride,  # elements between two ranks' contributions
    count,  # elements to add
    factor,  # what the sum is multiplied by, or divided by
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # whether `into` holds a value to add to
    SCALE: tl.constexpr,  # multiply: the divisor is a power of two, and this is the same to the last bit
    DIVIDE: tl.constexpr,  # divide, which takes as long as all the rest
    WIDE: tl.constexpr,  # tl.float32, or tl.float64
    NARROW: tl.constexpr,  # whether WIDE is tl.float32
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # blocks on their way, and one; 0 in Triton's interpreter, which cannot loop over a range
):
    """into = (into if ACCUMULATE else 0) + (sum over ranks, in rank order) / divisor"""
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    if STAGES == 0:
        while first < count:
            add_block(
                first, into, own, received, stride, count, factor,
                RANK, SIZE, ACCUMULATE, SCALE, DIVIDE, WIDE, NARROW, BLOCK,
            )  # fmt: skip
            first += step
    else:
        for start in tl.range(first, count, step, num_stages=STAGES):
            add_block(
                start, into, own, received, stride, count, factor,
                RANK, SIZE, ACCUMULATE, SCALE, DIVIDE, WIDE, NARROW, BLOCK,
            )  # fmt: skip


class FusedAdd:
    """Launches the kernel on raw addresses, for one rank of one group size.

    [Note: launching without the front door] Triton's own launch looks at every argument to pick a specialization, which
    costs more host time than the launch. All that it could find out is known here from dtypes and alignment, so the
    first launch of each kind goes through the front door, and later ones call the launcher of the compiled kernel that
    it returned, without Triton's hooks of profilers.

    Args:
        rank, size: This rank and the number of contributions.
        programs: Upper bound on the programs of one launch, and so on the SMs it occupies.
        block, warps: Elements of a program's turn at most, and its warps.
    """

    def __init__(self, rank: int, size: int, programs: int, *, block: int = BLOCK, warps: int = WARPS) -> None:
        self._rank = rank
        self._size = size
        self._programs = programs
        self._block = block
        self._warps = warps
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], int]] = {}  # kernel, constants, block

    def __call__(
        self,
        into: torch.Tensor,
        start: int,
        own: int,
        received: int,
        stride: int,
        count: int,
        wire: torch.dtype,
        divisor: int,
        accumulate: bool,
        stream: int,
    ) -> None:
        """Queues one addition on `stream`.

        Args:
            into: Contiguous; its elements `start` to `start + count` receive the result.
            own: Address of this rank's contribution, `count` elements of dtype `wire`.
            received: Address of the others', by rank, `stride` elements from one to the next.
            divisor: What the sum is divided by.
            accumulate: Whether the result is added to what `into` holds.

        Raises:
            GTPStateError: the first addition of its kind, during a graph capture: it would have to be compiled.
        """
        address = into.data_ptr() + start * into.element_size()
        bytes_apart = stride * wire.itemsize
        aligned = (address | own | received | bytes_apart) % 16 == 0 and (count | stride) % 16 == 0
        # A power of two is divided by exactly by multiplying with its reciprocal.
        scale = divisor & (divisor - 1) == 0
        how = 0 if divisor == 1 else 1 if scale else 2
        key = (into.dtype, wire, how, aligned, accumulate)
        found = self._compiled.get(key)
        if found is None:
            self._compile(into, wire, how, aligned)
            found = self._compiled[key]
        kernel, constants, block = found
        programs = min(self._programs, -(-count // block))
        factor = 1.0 / divisor if scale else float(divisor)
        kernel.run(
            programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
            address, own, received, stride, count, factor, *constants,
        )  # fmt: skip

    def _compile(self, into: torch.Tensor, wire: torch.dtype, how: int, aligned: bool) -> None:
        """Both with and without accumulation: a step that is captured may need the one that warm-up did not."""
        if torch.cuda.is_current_stream_capturing():
            raise GTPStateError(
                f"the gradient addition from {wire} into {into.dtype} has not run yet and cannot be compiled while a "
                "CUDA graph is captured: run one full step, backward included, before the capture"
            )
        wide = tl.float64 if torch.float64 in (into.dtype, wire) else tl.float32
        count = 32 if aligned else 31  # what the front door takes for a multiple of 16, or not
        shift = 0 if aligned else 1
        target = torch.zeros(2 * count, dtype=into.dtype, device=into.device)[shift:]
        source = torch.zeros(2 * count * self._size, dtype=wire, device=into.device)[shift:]
        for accumulate in (False, True):
            block, stages = self._shape(wire.itemsize, into.element_size() if accumulate else 0)
            constants = (
                self._rank, self._size, accumulate, how == 1, how == 2, wide, wide == tl.float32, block, stages
            )  # fmt: skip
            kernel = fused_add_kernel[(1,)](
                target, source, source, count, count, 2.0, *constants, num_warps=self._warps
            )
            self._compiled[into.dtype, wire, how, aligned, accumulate] = (kernel, constants, block)

    def _shape(self, wire_bytes: int, into_bytes: int) -> tuple[int, int]:
        """Elements per turn, and the depth of the pipeline: all shared memory of an SM, in three blocks at least.

        What one SM can add is limited by the bytes that it has asked for and not yet got.
        """
        element = self._size * wire_bytes + into_bytes
        block = self._block
        while block > 1024 and 3 * block * element > SHARED_BYTES:
            block //= 2
        return block, max(2, min(7, SHARED_BYTES // (block * element) + 1))

"""`SymmetricArena`: one block of memory per rank of a group, mapped into every other rank's address space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._symmetric_memory import _SymmetricMemory

from gtp.errors import GTPStateError

ALIGN = 256  # bytes between blocks: what copy engines and GEMMs like best


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next block may start."""
    return -(-nbytes // ALIGN) * ALIGN


class Arena(Protocol):
    """Memory of one size on every rank of a group.

    Attributes:
        local: This rank's block, uint8 `[nbytes]`.
        pointers: Per rank, the address of its block as mapped here.
    """

    local: torch.Tensor
    pointers: Sequence[int]


ArenaFactory = Callable[[int, dist.ProcessGroup], Arena]
"""Makes zeroed memory of a size in bytes on every rank of a group. Collective."""


class LocalArena:
    """An `Arena` of a group of one rank: ordinary memory.

    Args:
        nbytes: Size. Contents are zero.
        device: Where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.local = torch.zeros(aligned(max(nbytes, 1)), dtype=torch.uint8, device=device)
        self.pointers: Sequence[int] = (self.local.data_ptr(),)


class SymmetricArena:
    """An `Arena` in torch's symmetric memory. Making one is collective, takes milliseconds and no graph capture.

    The memory lives as long as the arena or any tensor over `local`.

    Args:
        nbytes: Size, the same on all ranks. Contents are zero.
        process_group: All of its ranks must be able to map each other's memory: see `why_not`.
        device: This rank's GPU.

    Raises:
        GTPStateError: called while a CUDA graph is being captured.
    """

    def __init__(self, nbytes: int, process_group: dist.ProcessGroup, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise GTPStateError(
                f"symmetric memory of {nbytes} bytes over group {process_group.group_name} is needed while a CUDA "
                "graph is captured, and ranks cannot exchange handles there: run one full step before the capture"
            )
        # torch's symm_mem.empty would take it from a pool that never gives memory back
        self.local: torch.Tensor = _SymmetricMemory.empty_strided_p2p(
            (aligned(max(nbytes, 1)),), (1,), torch.uint8, device
        )
        self.local.zero_()
        torch.cuda.synchronize(device)
        self._handle = symmetric_memory.rendezvous(self.local, process_group)
        self.pointers: Sequence[int] = tuple(self._handle.buffer_ptrs)
        self._device = device
        self._process_group = process_group
        self.barrier()  # nobody writes to a peer before that peer's zeros are there

    @property
    def nbytes(self) -> int:
        return self.local.numel()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This rank's memory at a byte offset, as a tensor that keeps the memory alive."""
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        return self.local[offset : offset + nbytes].view(dtype).view(shape)

    def peer(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A peer's memory at a byte offset, as a tensor. Valid while this arena lives."""
        peer: torch.Tensor = self._handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
        return peer

    def barrier(self) -> None:
        """Blocks the host until all ranks of the group have come and their queued work is done."""
        torch.cuda.synchronize(self._device)
        nccl = "nccl" in dist.get_backend(self._process_group)
        dist.barrier(self._process_group, device_ids=[self._device.index] if nccl else None)
        torch.cuda.synchronize(self._device)

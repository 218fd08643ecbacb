"""`HostPages`: physical memory and its addresses, apart from each other, on a CPU. Linux."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from gtp.ops.peer import Mapping

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000  # of mmap(2); Python's module has no name for them everywhere
_FAILED = ctypes.c_void_p(-1).value


class HostPages:
    """`gtp.ops.peer.Pages` of a process: files in memory, mapped where wanted. Tests see with it what is aliased.

    Attributes:
        page: Bytes of a page.
        mapped: Bytes that are mapped now.
        allocated: Bytes of handles that exist now.
    """

    def __init__(self) -> None:
        self.page = mmap.PAGESIZE
        self.mapped = 0
        self.allocated = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        )  # fmt: skip
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def create(self, nbytes: int, *, shared: bool) -> int:
        self._require_pages(nbytes)
        descriptor = os.memfd_create("gtp")
        os.ftruncate(descriptor, nbytes)
        self.allocated += nbytes
        return descriptor

    def release(self, handle: int) -> None:
        self.allocated -= os.fstat(handle).st_size
        os.close(handle)

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def import_(self, descriptor: int) -> int:
        handle = os.dup(descriptor)
        self.allocated += os.fstat(handle).st_size
        return handle

    def reserve(self, nbytes: int) -> int:
        self._require_pages(nbytes)
        return self._mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        if os.fstat(handle).st_size != nbytes:
            raise ValueError(f"all of a handle is mapped or nothing: it has {os.fstat(handle).st_size}, not {nbytes}")
        self._mmap(address, nbytes, _READ_WRITE, mmap.MAP_SHARED | _FIXED, handle)
        self.mapped += nbytes

    def retire(self, address: int, mapped: int, nbytes: int) -> None:
        if self._libc.munmap(address, nbytes):
            raise OSError(ctypes.get_errno(), "munmap")
        self.mapped -= mapped

    def tensor(self, mapping: Mapping) -> torch.Tensor:
        memory = (ctypes.c_uint8 * mapping.nbytes).from_address(mapping.address)
        memory.__dict__["owner"] = mapping  # torch's storage holds the array
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _mmap(self, address: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
        found: int | None = self._libc.mmap(address, nbytes, access, flags, descriptor, 0)
        if found is None or found == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        return found

    def _require_pages(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self.page:
            raise ValueError(f"{nbytes} bytes are no whole pages of {self.page}")

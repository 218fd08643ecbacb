"""Physical memory and the addresses it is seen at, apart from each other: one block may be mapped at many places.

A gathered weight is one range of addresses, of which one part is this rank's own shard. With the shard's block mapped
there, that part needs no copy: an optimizer's write is seen in it as soon as a later kernel reads it. Reads through one
mapping after writes through another are defined where kernels are ordered, by a stream or an event, as they are here.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from gtp.errors import GTPStateError
from gtp.ops.peer.watchdog import WATCHDOG_THREAD


class Pages(Protocol):
    """What can be done with physical memory, in whole pages. Handles and addresses are plain integers.

    Attributes:
        page: Bytes of a page. All sizes and addresses below are multiples of it.
    """

    page: int

    def create(self, nbytes: int, *, shared: bool) -> int:
        """Physical memory, as a handle. `shared`: it can be exported. Raises `torch.OutOfMemoryError`."""
        ...

    def release(self, handle: int) -> None:
        """The handle goes; the memory does when no mapping is left either."""
        ...

    def export(self, handle: int) -> int:
        """A file descriptor that another process can import. To be closed by the caller."""
        ...

    def import_(self, descriptor: int) -> int:
        """A handle from a file descriptor, which stays open."""
        ...

    def reserve(self, nbytes: int) -> int:
        """A range of addresses with nothing behind it."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """All of a handle's memory, of this size, at an address of a reserved range. Readable and writable. What fails
        leaves nothing there."""
        ...

    def retire(self, address: int, mapped: int, nbytes: int) -> None:
        """Unmaps the first `mapped` bytes of a reserved range, and gives its addresses back, once no queued work can
        be using it."""
        ...

    def tensor(self, mapping: Mapping) -> torch.Tensor:
        """uint8 `[mapping.nbytes]` over a mapping, which lives as long as this storage does."""
        ...


class Block:
    """Physical memory of one size. It is freed when this object and all mappings of it are gone.

    Args:
        pages: Where.
        nbytes: A multiple of the page.
        handle: Memory that exists already, for instance a peer's. None: made now.
        shared: Whether peers may map it.
    """

    __slots__ = ("__weakref__", "handle", "nbytes")

    def __init__(self, pages: Pages, nbytes: int, handle: int | None = None, *, shared: bool = False) -> None:
        self.nbytes = nbytes
        self.handle = pages.create(nbytes, shared=shared) if handle is None else handle
        weakref.finalize(self, pages.release, self.handle).atexit = False


class Mapping:
    """Blocks at consecutive addresses. Unmapped when this object is gone, which tensors over it prevent."""

    __slots__ = ("__weakref__", "_pages", "address", "blocks", "nbytes")

    def __init__(self, pages: Pages, blocks: Sequence[Block]) -> None:
        self._pages = pages
        self.blocks = tuple(blocks)
        self.nbytes = sum(block.nbytes for block in blocks)
        self.address = pages.reserve(self.nbytes)
        mapped = 0
        try:
            for block in blocks:
                pages.map(self.address + mapped, block.nbytes, block.handle)
                mapped += block.nbytes
        except BaseException:
            pages.retire(self.address, mapped, self.nbytes)
            raise
        weakref.finalize(self, pages.retire, self.address, mapped, self.nbytes).atexit = False

    def tensor(self) -> torch.Tensor:
        """uint8 `[nbytes]` over it."""
        return self._pages.tensor(self)


class _Garbage:
    """What the garbage collector finds the next time that it looks."""

    itself: _Garbage


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # CUmemLocation


class _Properties(ctypes.Structure):
    # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]  # CUmemAccessDesc


class _Memory:
    """CUDA memory as other libraries are told of it. torch's storage over it holds this object."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (mapping.nbytes,), "typestr": "|u1", "data": (mapping.address, False), "version": 3,
        }  # fmt: skip


_log = logging.getLogger("gtp")

# Values of the CUDA driver API
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaPages:
    """`Pages` of a CUDA device, by the driver's virtual memory management.

    Args:
        device: The device that owns and sees the memory.

    Raises:
        GTPStateError: libcuda cannot be loaded, or a call of it failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GTPStateError(f"the CUDA driver library libcuda.so.1 cannot be loaded: {error}") from error
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties(True)), 0)
        self.page = granularity.value

    def create(self, nbytes: int, *, shared: bool) -> int:
        handle = ctypes.c_uint64()
        arguments = (ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(self._properties(shared)), _u64(0))
        status = self._try("cuMemCreate", *arguments)
        if status == _OUT_OF_MEMORY and not torch.cuda.is_current_stream_capturing():
            gc.collect()  # see `retire`
            torch.cuda.empty_cache()  # torch holds memory that it does not use
            status = self._try("cuMemCreate", *arguments)
        if status == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self._index)
            what = "a shard" if shared else "gathered weights"
            advice = "" if shared else ". GTPConfig(prefetch_bytes=..., keep_bytes=...) bound what is gathered ahead"
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {nbytes} bytes of GPU {self._index} are wanted for {what}, and {free} of {total} "
                f"are free{advice}"
            )
        self._check("cuMemCreate", status)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", _u64(handle))

    def export(self, handle: int) -> int:
        descriptor = ctypes.c_int()
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), _u64(handle), _FILE_DESCRIPTOR, _u64(0))
        return descriptor.value

    def import_(self, descriptor: int) -> int:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _FILE_DESCRIPTOR
        )
        return handle.value

    def reserve(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), _u64(0), _u64(0))
        return address.value

    def map(self, address: int, nbytes: int, handle: int) -> None:
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemMap", _u64(address), size, ctypes.c_size_t(0), _u64(handle), _u64(0))
        access = _Access(_Location(_ON_DEVICE, self._index), _READ_WRITE)
        try:
            self._call("cuMemSetAccess", _u64(address), size, ctypes.byref(access), ctypes.c_size_t(1))
        except GTPStateError:
            self._call("cuMemUnmap", _u64(address), size)
            raise

    def retire(self, address: int, mapped: int, nbytes: int) -> None:
        # A finalizer runs in any thread at any time: one that captures, or one that ends what the device waits for.
        try:
            if threading.current_thread().name == WATCHDOG_THREAD or torch.cuda.is_current_stream_capturing():
                self._retire_later(address, mapped, nbytes)
                return
            with _relaxed(self._cuda):
                torch.cuda.synchronize(self._index)
        except RuntimeError as error:
            if "captur" in str(error):  # another thread does
                self._retire_later(address, mapped, nbytes)
            else:
                _log.debug("gtp: GPU %d has failed, and memory of it stays mapped: %s", self._index, error)
            return
        if mapped:
            self._call("cuMemUnmap", _u64(address), ctypes.c_size_t(mapped))
        self._call("cuMemAddressFree", _u64(address), ctypes.c_size_t(nbytes))

    def _retire_later(self, address: int, mapped: int, nbytes: int) -> None:
        """When the garbage collector finds what is made here."""
        garbage = _Garbage()
        garbage.itself = garbage
        weakref.finalize(garbage, self.retire, address, mapped, nbytes).atexit = False

    def tensor(self, mapping: Mapping) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.as_tensor(_Memory(mapping), device=torch.device("cuda", self._index))

    def _properties(self, shared: bool) -> _Properties:
        kinds = _FILE_DESCRIPTOR if shared else 0
        return _Properties(type=_PINNED, handle_types=kinds, location=_Location(_ON_DEVICE, self._index))

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._try(name, *arguments))

    def _try(self, name: str, *arguments: object) -> int:
        with _relaxed(self._cuda):
            status: int = getattr(self._cuda, name)(*arguments)
        return status

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            message = text.value.decode() if text.value else "unknown error"
            raise GTPStateError(f"{name} failed with CUDA driver error {status}: {message}")


@contextmanager
def _relaxed(cuda: ctypes.CDLL) -> Iterator[None]:
    """What is called inside is no work for a stream, and a capture in progress need not know of it."""
    mode = ctypes.c_int(_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_u64 = ctypes.c_uint64

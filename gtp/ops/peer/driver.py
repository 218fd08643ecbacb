"""What peer-to-peer code asks of the CUDA driver: streams, events, copies, and signals that no SM has to watch.

Everything here is called many times per layer, so handles are plain integers and a call is one foreign-function call
into libcuda. The surface is small on purpose: a test can stand in for it with a simulation of streams on the CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gtp.errors import GTPStateError


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """Stores a 32-bit value, in stream order, visible to all GPUs after everything the stream did before it."""

    address: int
    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Holds the stream until the 32-bit word equals `value`. Done by the front end: no kernel, no SM."""

    address: int
    value: int


SignalOp = Write | Wait


class Driver(Protocol):
    """Streams, events and peer memory of one device. Streams and events are raw handles, addresses device pointers."""

    def new_stream(self, *, urgent: bool = True) -> int:
        """A stream that lives as long as the driver. Kernels on an urgent one get the next free SM."""
        ...

    def new_event(self) -> int:
        """An event without timing that lives as long as the driver."""
        ...

    def current_stream(self) -> int:
        """The calling thread's current stream of torch."""
        ...

    def capture(self) -> int:
        """Identifies the CUDA graph capture that the current stream is in; 0 if none."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Records `event` on `stream`."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """`stream` waits for `event`."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copies device memory, own or a peer's mapped one, by a copy engine."""
        ...

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        """Copies `rows` pieces of `width` bytes, which begin a pitch apart, by a copy engine."""
        ...

    def batch(self, ops: Sequence[SignalOp]) -> Any:
        """Prepares signal operations to be submitted any number of times, in order."""
        ...

    def submit(self, batch: Any, stream: int) -> None:
        """Queues a prepared batch: one call, whatever its length."""
        ...


class _WaitOrWrite(ctypes.Structure):
    # CUstreamBatchMemOpParams: its waitValue and writeValue members have the same layout
    _fields_ = [
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
    ]


class _Operation(ctypes.Union):
    _fields_ = [("params", _WaitOrWrite), ("pad", ctypes.c_uint64 * 6)]


class _Copy2D(ctypes.Structure):
    # CUDA_MEMCPY2D
    _fields_ = [
        *((f"{side}{name}", kind) for side in ("src", "dst") for name, kind in (
            ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]  # fmt: skip


# Values of the CUDA driver API (CUstreamBatchMemOpType, CUstreamWaitValue_flags, CUstreamWriteValue_flags)
WAIT_VALUE_32 = 1
WRITE_VALUE_32 = 2
WAIT_EQUAL = 1
WRITE_DEFAULT = 0  # with a memory barrier before the write
MEMORY_DEVICE = 2  # CUmemorytype


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    count: int
    operations: Any


def signal_batch(ops: Sequence[SignalOp]) -> _Batch:
    """The driver's form of signal operations."""
    array = (_Operation * len(ops))()
    for slot, op in zip(array, ops, strict=True):
        params = slot.params
        waits = isinstance(op, Wait)
        params.operation = WAIT_VALUE_32 if waits else WRITE_VALUE_32
        params.address = op.address
        params.value = op.value
        params.flags = WAIT_EQUAL if waits else WRITE_DEFAULT
    return _Batch(len(ops), array)


def current_capture(index: int) -> int:
    """Identifies the CUDA graph capture that the current stream of device `index` is in; 0 if none."""
    if not torch._C._cuda_isCurrentStreamCapturing():
        return 0
    from cuda.bindings import driver

    status, _, identifier, *_ = driver.cuStreamGetCaptureInfo(torch._C._cuda_getCurrentRawStream(index))
    if int(status) != 0:
        raise GTPStateError(f"cuStreamGetCaptureInfo failed: {status}")
    return int(identifier)


class CudaDriver:
    """The real one.

    Args:
        device: A CUDA device. Must be the current device of the threads that call.

    Raises:
        GTPStateError: libcuda cannot be loaded, or, later, a driver call failed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._streams: list[torch.cuda.Stream] = []
        self._events: list[torch.cuda.Event] = []
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GTPStateError(f"the CUDA driver library libcuda.so.1 cannot be loaded: {error}") from error
        u64, pointer = ctypes.c_uint64, ctypes.c_void_p
        self._library = library
        self._copy = _function(library, "cuMemcpyDtoDAsync_v2", u64, u64, ctypes.c_size_t, pointer)
        self._copy_2d = _function(library, "cuMemcpy2DAsync_v2", ctypes.POINTER(_Copy2D), pointer)
        self._record = _function(library, "cuEventRecord", pointer, pointer)
        self._wait = _function(library, "cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        self._signals = _function(
            library, "cuStreamBatchMemOp_v2", pointer, ctypes.c_uint, ctypes.POINTER(_Operation), ctypes.c_uint
        )

    def new_stream(self, *, urgent: bool = True) -> int:
        self._streams.append(torch.cuda.Stream(self.device, priority=-1 if urgent else 0))
        return int(self._streams[-1].cuda_stream)

    def new_event(self) -> int:
        event = torch.cuda.Event()
        # torch makes the event when it is first recorded; a stream of our own, since the current one may be captured
        if not self._streams:
            self.new_stream()
        event.record(self._streams[0])
        self._events.append(event)
        return int(event.cuda_event)

    def current_stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def capture(self) -> int:
        return current_capture(self._index)

    def record(self, event: int, stream: int) -> None:
        if status := self._record(event, stream):
            self._fail("cuEventRecord", status)

    def wait_event(self, stream: int, event: int) -> None:
        if status := self._wait(stream, event, 0):
            self._fail("cuStreamWaitEvent", status)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        if status := self._copy(dst, src, nbytes, stream):
            self._fail("cuMemcpyDtoDAsync", status)

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        request = _Copy2D(
            srcMemoryType=MEMORY_DEVICE, srcDevice=src, srcPitch=src_pitch, dstMemoryType=MEMORY_DEVICE, dstDevice=dst,
            dstPitch=dst_pitch, WidthInBytes=width, Height=rows,
        )  # fmt: skip
        if status := self._copy_2d(ctypes.byref(request), stream):
            self._fail("cuMemcpy2DAsync", status)

    def batch(self, ops: Sequence[SignalOp]) -> _Batch:
        return signal_batch(ops)

    def submit(self, batch: _Batch, stream: int) -> None:
        if status := self._signals(stream, batch.count, batch.operations, 0):
            self._fail("cuStreamBatchMemOp", status)

    def _fail(self, call: str, status: int) -> None:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise GTPStateError(f"{call} failed with CUDA driver error {status}: {message}")


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function

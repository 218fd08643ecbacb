"""Leased buffers: memory for gathered weights and wgrads that is reused only after nobody can read it.

[Note: when a lease ends] What `BufferPool.lease` hands out is a fresh tensor over pooled memory. The lease ends when
its last reader goes, and there are two kinds of readers. Python's end with the tensor object, seen by a weak reference.
Autograd's, and views that somebody took, hold the storage and not the object, so they are seen by the storage's use
count, against the count the buffer has at rest. When the object is gone and the count is at rest, an event is recorded
on each consuming stream, and whoever writes the buffer next waits for them. When the object is gone and the count
is not at rest, the buffer lingers and is looked at again on the next lease. No assumption about neighbours, parity
or order is made anywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from gtp.errors import GTPStateError

if TYPE_CHECKING:
    from gtp.runtime.in_place import Place

Kind = int | tuple[int, ...]
"""What buffers have in common that can take each other's place: bytes, or those of the pieces of a `MappedBuffer`."""

_ALIGN = 256  # bytes between members of one buffer: what GEMMs and copy engines like best

_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # of a storage, by its address


class Buffer:
    """One block of pooled memory. States: free, leased (`holds` > 0), lingering (holds == 0, storage still read).

    Attributes:
        lasting: Whether its memory stays when a pool gives it up, which then saves nothing.
    """

    __slots__ = (
        "_address",
        "_base",
        "_rest",
        "_storage",
        "_views",
        "events",
        "holds",
        "home",
        "kind",
        "lasting",
        "nbytes",
        "streams",
    )

    def __init__(self, base: torch.Tensor, home: torch.cuda.Stream | None) -> None:
        self._look_at(base)
        self.home = home  # the stream that the allocator gives this memory to, when it is given back
        self._views: dict[object, list[torch.Tensor]] = {}
        self.kind: Kind = base.numel()
        self.nbytes = base.numel()
        self.lasting = False
        self.holds = 0
        self.streams: list[torch.cuda.Stream] = []
        self.events: list[torch.cuda.Event] = []

    def views(self, key: object, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Typed tensors over this memory, one per shape, one after the other. Made once per `key`.

        To be called by the holder before anything is handed out: what uses the storage then is what it is at rest.
        """
        views = self._views.get(key)
        if views is None:
            sizes = [_nbytes(shape, dtype) for shape in shapes]
            views = [
                self._base[start : start + size].view(dtype).view(shape)
                for start, size, shape in zip(self._starts(sizes), sizes, shapes, strict=True)
            ]
            self._views[key] = views
            self._rest = _use_count(self._address)
        return views

    def enter(self, place: Place) -> None:
        """The holder is about to use it for this group: of interest to memory that can be mapped."""

    def shard_written(self, place: Place) -> None:
        """Shards of this group are about to be written, which changes memory that they are mapped into."""

    def capture_ended(self) -> None:
        """It was free when its capture ended, and is in no pool any more."""

    def readable(self, dying: int = 0) -> bool:
        """Whether some tensor outside the pool, other than `dying` ones, still looks at this memory."""
        return _use_count(self._address) > self._rest + dying

    def _starts(self, sizes: Sequence[int]) -> Sequence[int]:
        """Where views of these bytes begin."""
        return [0, *accumulate(_aligned(size) for size in sizes[:-1])]

    def _look_at(self, base: torch.Tensor) -> None:
        """`base`, at rest, is what is handed out from here on."""
        self._base = base
        self._storage = base.untyped_storage()
        self._address = self._storage._cdata
        self._rest = _use_count(self._address)


def nbytes_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes of one buffer that holds tensors of these shapes, alignment included."""
    return sum(_aligned(_nbytes(shape, dtype)) for shape in shapes)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for dim in shape:
        count *= dim
    return count


def _aligned(nbytes: int) -> int:
    return max(-(-nbytes // _ALIGN) * _ALIGN, _ALIGN)


class BufferPool:
    """Buffers of one device. A buffer is held while `holds` > 0: one hold per handed-out tensor, one per owner.

    Args:
        allocate: Makes uint8 memory of a size in bytes. Not called in inference mode, which the memory would outlive.
        limit: Bytes the pool keeps; beyond it, free buffers of other sizes are given back before a new one is made.
            What is leased at one time is the caller's business and may exceed it.
        on_cuda: Whether ends of leases are ordered by CUDA events.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], *, limit: int, on_cuda: bool) -> None:
        self._allocate = allocate
        self._limit = limit
        self._on_cuda = on_cuda
        self._free: dict[Kind, list[Buffer]] = {}
        self._lingering: list[Buffer] = []
        self._spare_events: list[torch.cuda.Event] = []
        self._handed: dict[int, tuple[weakref.ref[torch.Tensor], Buffer]] = {}  # by id of the reference
        self._raw_stream = -1
        self._stream: torch.cuda.Stream | None = None
        self._several_streams = False  # whether more than one has used the pool
        self.reserved_bytes = 0
        self.leased_bytes = 0
        self.peak_leased_bytes = 0

    def lease(self, room: int | Place) -> Buffer:
        """A buffer, held once by the caller. Write it only after `buffer.events`.

        Args:
            room: Its bytes; or where this rank's own part lies already, and how to make a buffer around it.
        """
        if self._lingering:
            self._collect()
        free = self._free.get(room if isinstance(room, int) else room.kind)
        buffer = free.pop() if free else self._new(room)
        if not isinstance(room, int):
            try:
                buffer.enter(room)
            except BaseException:
                self._free.setdefault(buffer.kind, []).append(buffer)
                raise
        buffer.holds = 1
        self.leased_bytes += buffer.nbytes
        if self.leased_bytes > self.peak_leased_bytes:
            self.peak_leased_bytes = self.leased_bytes
        return buffer

    def hand_out(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Adds a hold that ends with `tensor`, a fresh view of the buffer. See [Note: when a lease ends]."""
        buffer.holds += 1
        if self._on_cuda:
            self.used(buffer)
        lease = weakref.ref(tensor, self._ended)
        self._handed[id(lease)] = lease, buffer

    def used(self, buffer: Buffer) -> None:
        """The current stream reads the buffer from here on, which is complete on the first stream that does.

        Another one waits for the first: that is where whoever filled the buffer was waited for.
        """
        stream, streams = self._current_stream(), buffer.streams
        if stream is None:
            return
        if not streams:
            streams.append(stream)
        elif streams[-1] is not stream and stream not in streams:
            stream.wait_stream(streams[0])
            streams.append(stream)

    def let_go(self, buffer: Buffer, dying: int = 0) -> None:
        """Ends one hold. The last one frees the buffer, or leaves it lingering while views of it live."""
        if buffer.holds <= 0:
            raise GTPStateError("a buffer was let go more often than it was held: a bug in gtp, please report it")
        buffer.holds -= 1
        if buffer.holds == 0:
            if buffer.readable(dying):
                if not buffer.streams and (current := self._current_stream()) is not None:
                    buffer.streams.append(current)  # a wgrad, which another stream may find at rest
                self._lingering.append(buffer)
            else:
                self._retire(buffer)

    def await_events(self, buffer: Buffer) -> None:
        """The current stream writes the buffer next: it waits for the last readers."""
        stream = self._current_stream()
        for event in buffer.events:
            event.wait(stream)
        self.recycle_events(buffer)

    def join_readers(self, buffer: Buffer) -> None:
        """If several streams read, the current one waits for the last readers: what comes after it comes after them."""
        stream = self._current_stream()
        if self._several_streams:
            for event in buffer.events:
                event.wait(stream)

    def recycle_events(self, buffer: Buffer) -> None:
        """After the next writer was made to wait: the events may be recorded anew."""
        self._spare_events.extend(buffer.events)
        buffer.events.clear()

    def shard_written(self, place: Place) -> None:
        """This rank's shards change where they are. Who has kept a full weight of them for backward is to know."""
        handed = list(self._handed.values())  # the garbage collector may end a lease meanwhile
        for buffer in {*(buffer for _, buffer in handed), *self._lingering}:
            buffer.shard_written(place)

    def trim(self) -> None:
        """Gives every free buffer back to the allocator. Leased ones stay, and lasting ones."""
        self._collect()
        for buffers in list(self._free.values()):
            while buffers and not buffers[-1].lasting:
                self._give_back(buffers.pop())

    def end(self) -> None:
        """The capture that this pool served is over, and so is every event in it."""
        self._collect()
        for buffers in list(self._free.values()):
            for buffer in buffers:
                buffer.events.clear()
                buffer.capture_ended()
        self._free.clear()

    def _ended(self, lease: weakref.ref[torch.Tensor]) -> None:
        _, buffer = self._handed.pop(id(lease))
        self.let_go(buffer, dying=1)  # the callback runs just before the tensor lets go of its storage

    def _collect(self) -> None:
        looked_at, self._lingering = self._lingering, []  # the garbage collector may end a lease meanwhile
        for buffer in looked_at:
            if buffer.readable():
                self._lingering.append(buffer)
            else:
                self._retire(buffer)

    def _retire(self, buffer: Buffer) -> None:
        if self._on_cuda:
            # What is not gathered, but a wgrad, was last used in the order of the current stream.
            for stream in buffer.streams or (self._current_stream(),):
                self._record(buffer, stream)
            buffer.streams.clear()
        self.leased_bytes -= buffer.nbytes
        self._free.setdefault(buffer.kind, []).append(buffer)

    def _current_stream(self) -> torch.cuda.Stream | None:
        """torch's own way to the current stream costs more than everything else here together."""
        if not self._on_cuda:
            return None
        raw = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        if raw != self._raw_stream:
            self._several_streams = self._raw_stream != -1
            self._raw_stream, self._stream = raw, torch.cuda.current_stream()
        return self._stream

    def _record(self, buffer: Buffer, stream: torch.cuda.Stream | None) -> None:
        """The next writer waits for what `stream` has been given so far."""
        if stream is not None:
            event = self._spare_events.pop() if self._spare_events else torch.cuda.Event()
            event.record(stream)
            buffer.events.append(event)

    def _new(self, room: int | Place) -> Buffer:
        nbytes = room if isinstance(room, int) else sum(room.kind)
        excess = self.reserved_bytes + nbytes - self._limit
        if excess > 0:
            # largest first: fewest allocator calls, and a vocabulary-sized buffer does not stay for a step
            for buffers in sorted(filter(None, self._free.values()), key=lambda b: b[0].nbytes, reverse=True):
                while buffers and not buffers[-1].lasting and excess > 0:
                    excess -= buffers[0].nbytes
                    self._give_back(buffers.pop())
        home = self._current_stream()
        buffer = Buffer(self._allocate(nbytes), home) if isinstance(room, int) else room.new_buffer(home)
        self.reserved_bytes += buffer.nbytes
        # The allocator hands out memory in the order of the current stream: what had it before may not have run yet.
        self._record(buffer, home)
        return buffer

    def _give_back(self, buffer: Buffer) -> None:
        for event in buffer.events:
            event.wait(buffer.home)
        self.recycle_events(buffer)
        self.reserved_bytes -= buffer.nbytes

"""`Agreement`: ranks compare what they are about to do, so that unequal shapes are an error and not a hang."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from gtp.errors import DesyncError
from gtp.ops.notes import Notes

_DEBUG_TIMEOUT = 10.0  # seconds
_DEFAULT_TIMEOUT = 600.0

Operation = tuple[str, int, int, torch.dtype]
"""What it is called, rows and columns of what one rank has, and their dtype."""


class Agreement:
    """Compares notes of all ranks of a group; see `Notes`.

    On the CPU notes are compared before every call: a store round trip beside a collective through the host. (gloo ends
    the process where sizes differ.)

    On a GPU a note is compared when this rank is about to do something for the first time: a new operation, shape or
    dtype. That is one store round trip per new shape, and catches the usual mistake, ranks that disagree from the
    start. What it cannot catch is a rank that repeats a known shape while another comes with a new one: the second
    waits for the first one's note and raises after ten minutes, or after the group's own time-out if that is shorter.
    `every_call=True` catches that too, at a round trip per call.

    Nothing is compared while a CUDA graph is captured: everything captured has run before, in the warm-up.
    """

    def __init__(self, process_group: dist.ProcessGroup, *, every_call: bool) -> None:
        self._process_group = process_group
        self._every_call = every_call
        self._seen: set[Operation] = set()

    @functools.cached_property
    def _timeout(self) -> float:
        """Seconds to wait for a rank's note."""
        return _DEBUG_TIMEOUT if self._every_call else min(_DEFAULT_TIMEOUT, _group_timeout(self._process_group))

    @functools.cached_property
    def _notes(self) -> Notes:
        return Notes("gtp.tp", self._process_group, self._timeout)

    def check(self, operation: Operation, device: torch.device) -> None:
        """All ranks of the group are about to do `operation` with tensors on `device`.

        Raises:
            DesyncError: another rank is about to do something else, or does not come.
        """
        if not self._every_call and device.type != "cpu" and operation in self._seen:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        name, rows, columns, dtype = operation
        what = f"{name} {(rows, columns)} {dtype}"
        me = dist.get_rank()
        theirs: dict[int, str] = {}
        for rank, note in self._notes.exchange(what):
            if note is None:
                raise DesyncError(
                    f"rank {me} is about to do {what} over group {self._process_group.group_name}, and rank {rank} did "
                    f"not come within {self._timeout:g} s: it has left, waits elsewhere, or repeats an earlier shape. "
                    "All ranks must call the same operations in the same order with equal shapes"
                )
            theirs[rank] = note
        if any(note != what for note in theirs.values()):
            notes = "; ".join(f"rank {rank}: {note}" for rank, note in sorted({**theirs, me: what}.items()))
            raise DesyncError(
                f"ranks of tensor-parallel group {self._process_group.group_name} disagree on the next collective "
                f"GEMM. {notes}. All ranks must call the same operations in the same order with equal shapes and "
                "dtypes: pad the sequence to a multiple of the group size before it is split"
            )
        self._seen.add(operation)  # by now it has been compared, and ranks agree


def _group_timeout(process_group: dist.ProcessGroup) -> float:
    """Seconds that the group's own collectives wait for a rank."""
    backends = [process_group._get_backend(torch.device(kind)) for kind in process_group._device_types]
    options = [b.options for b in backends if getattr(b, "options", None) is not None]
    return min((o._timeout.total_seconds() for o in options), default=_DEFAULT_TIMEOUT)

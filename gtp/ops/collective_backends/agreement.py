"""`Agreement`: ranks compare what they are about to do, so that unequal shapes are an error and not a hang."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from gtp.errors import DesyncError

_DEBUG_TIMEOUT = datetime.timedelta(seconds=10)
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)
_KEPT = 4  # own notes that stay in the store in debug mode; peers are at most one step behind

Operation = tuple[str, int, int, torch.dtype]
"""What it is called, rows and columns of what one rank has, and their dtype."""


class Agreement:
    """Compares notes of all ranks of a group through the job's rendezvous store. No collective, nothing on the device.

    By default a note is compared when this rank is about to do something for the first time: a new operation, shape or
    dtype. That is one store round trip per new shape, and catches the usual mistake, ranks that disagree from the
    start. What it cannot catch is a rank that repeats a known shape while another comes with a new one: the second
    waits for the first one's note and raises after ten minutes. `every_call=True` catches that too, at a round trip per
    call.

    Nothing is compared while a CUDA graph is captured: everything captured has run before, in the warm-up.
    """

    def __init__(self, process_group: dist.ProcessGroup, *, every_call: bool) -> None:
        self._process_group = process_group
        self._every_call = every_call
        self._timeout = _DEBUG_TIMEOUT if every_call else _DEFAULT_TIMEOUT
        self._seen: set[Operation] = set()
        self._step = 0
        self._store: dist.PrefixStore | None = None

    def check(self, operation: Operation) -> None:
        """All ranks of the group are about to do `operation`.

        Raises:
            DesyncError: another rank is about to do something else, or does not come.
        """
        if not self._every_call and operation in self._seen:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        name, rows, columns, dtype = operation
        what = f"{name} {(rows, columns)} {dtype}"
        store = self._connected()
        step, self._step = self._step, self._step + 1
        me = dist.get_rank()
        store.set(f"{step}/{me}", what)
        if self._every_call and step >= _KEPT:
            store.delete_key(f"{step - _KEPT}/{me}")
        theirs = {
            rank: self._note(store, step, me, rank, what)
            for rank in dist.get_process_group_ranks(self._process_group)
            if rank != me
        }
        if any(note != what for note in theirs.values()):
            notes = "; ".join(f"rank {rank}: {note}" for rank, note in sorted({**theirs, me: what}.items()))
            raise DesyncError(
                f"ranks of tensor-parallel group {self._process_group.group_name} disagree on the next collective "
                f"GEMM. {notes}. All ranks must call the same operations in the same order with equal shapes and "
                "dtypes: pad the sequence to a multiple of the group size before it is split"
            )
        self._seen.add(operation)  # by now it has been compared, and ranks agree

    def _connected(self) -> dist.PrefixStore:
        """A part of the store of its own. Made on first use: single-rank groups need no store."""
        if self._store is None:
            root = dist.PrefixStore("gtp.tp", dist.distributed_c10d._get_default_store())
            name = self._process_group.group_name
            # Backends of a group are made in the same order on all its ranks; the store counts them, so we need not.
            index = root.add(f"{name}/made/{dist.get_rank()}", 1)
            self._store = dist.PrefixStore(f"{name}/{index}", root)
        return self._store

    def _note(self, store: dist.PrefixStore, step: int, me: int, rank: int, what: str) -> str:
        key = f"{step}/{rank}"
        try:
            store.wait([key], self._timeout)
        except dist.DistStoreError as error:
            raise DesyncError(
                f"rank {me} is about to do {what} over group {self._process_group.group_name}, and rank {rank} did not "
                f"come within {self._timeout.total_seconds():g} s: it has left, waits elsewhere, or repeats an earlier "
                "shape. All ranks must call the same operations in the same order with equal shapes"
            ) from error
        return store.get(key).decode()

"""`Notes`: ranks tell each other what they are about to do, so that disagreement is an error and not a hang."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import torch.distributed as dist

_KEPT = 4  # own notes that stay in the store; peers are at most one step behind


class Notes:
    """Notes of the ranks of a process group, through the job's rendezvous store. No collective, nothing on the device.

    So a rank that sits in a collective, or has left, holds nobody up for longer than the time-out.

    Args:
        purpose: Keeps them apart from other notes over the same group.
        process_group: The group. Its ranks make their notes of one purpose in the same order.
        timeout: Seconds to wait for a rank's note.
    """

    def __init__(self, purpose: str, process_group: dist.ProcessGroup, timeout: float) -> None:
        self._purpose = purpose
        self._process_group = process_group
        self._timeout = datetime.timedelta(seconds=timeout)
        self._store: dist.PrefixStore | None = None
        self.step = -1
        """Index of the last exchange."""

    def exchange(self, what: str) -> Iterator[tuple[int, str | None]]:
        """Writes this rank's next note and reads the others': global rank and note, None from one that did not come."""
        store = self._connected()
        self.step += 1
        me = dist.get_rank()
        store.set(f"{self.step}/{me}", what)
        if self.step >= _KEPT:
            store.delete_key(f"{self.step - _KEPT}/{me}")
        for rank in dist.get_process_group_ranks(self._process_group):
            if rank != me:
                yield rank, self._read(store, f"{self.step}/{rank}")

    def _connected(self) -> dist.PrefixStore:
        """A part of the store of its own. Made on first use: one rank alone needs no store."""
        if self._store is None:
            root = dist.PrefixStore(self._purpose, dist.distributed_c10d._get_default_store())
            name = self._process_group.group_name
            # Notes of before, or of somebody else over this group, must not be read for these. The store counts them,
            # since no module keeps state.
            index = root.add(f"{name}/made/{dist.get_rank()}", 1)
            self._store = dist.PrefixStore(f"{name}/{index}", root)
        return self._store

    def _read(self, store: dist.PrefixStore, key: str) -> str | None:
        try:
            store.wait([key], self._timeout)
        except dist.DistStoreError:
            return None
        note: str = store.get(key).decode()
        return note

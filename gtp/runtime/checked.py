"""`CheckedTransport`: with `GTPConfig(debug=True)`, ranks compare notes before each collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import DesyncError
from gtp.ops.notes import Notes
from gtp.runtime.group import WeightGroup
from gtp.runtime.in_place import Place
from gtp.runtime.transport import Transport


class CheckedTransport(Transport):
    """Wraps a transport. Every rank writes what it is about to do into the job's store and reads what its peers wrote.

    Ranks that disagree all raise, naming both sides, instead of mixing two weights of equal size or waiting for ever.
    The notes travel through the rendezvous store and not through the group, so a rank that sits in another collective,
    or has left, cannot make the check hang: it is named after `timeout` seconds.
    """

    def __init__(self, inner: Transport, timeout: float) -> None:
        self._inner = inner
        self._timeout = timeout
        self._notes: dict[str, Notes] = {}  # by name of the group
        self._groups: list[dist.ProcessGroup] = []
        self.name = inner.name
        self.peers_read = inner.peers_read

    def agree(self, process_group: dist.ProcessGroup, what: str) -> None:
        """All ranks of `process_group` are about to do `what`.

        Raises:
            DesyncError: another rank is about to do something else, or does not come.
        """
        if process_group.size() == 1:
            return
        name = process_group.group_name
        notes = self._notes.get(name)
        if notes is None:
            notes = self._notes[name] = Notes("gtp.debug", process_group, self._timeout)
        me = dist.get_rank()
        for rank, theirs in notes.exchange(what):
            if theirs is None:
                raise DesyncError(
                    f"rank {me} is about to do step {notes.step} of group {name}, {what}, and rank {rank} did not come "
                    f"within {self._timeout:g} s. It has left its forward or backward, or waits elsewhere. All ranks "
                    "of a GTP group must use the same weights in the same order; a rank without work for a module must "
                    "still run it"
                )
            if theirs != what:
                raise DesyncError(
                    f"ranks of group {name} disagree at step {notes.step}: rank {me} is about to do {what}; rank "
                    f"{rank}: {theirs}. All ranks of a GTP group must use the same weights in the same order; a rank "
                    "without work for a module must still run it (on an empty or masked input)"
                )

    def place(self, group: WeightGroup) -> Place | None:
        return self._inner.place(group)

    def prepare(self, groups: Sequence[WeightGroup]) -> None:
        self._groups = list(dict.fromkeys(g.process_group for g in groups))
        for group in groups:
            self.agree(group.process_group, f"shard {_describe(group)}")
        self._inner.prepare(groups)

    def open(self, groups: Sequence[WeightGroup]) -> None:
        for process_group in self._groups:
            self.agree(process_group, "begin a forward")
        self._inner.open(groups)

    def now_current(self, group: WeightGroup) -> None:
        self._inner.now_current(group)

    def close(self) -> None:
        for process_group in self._groups:
            self.agree(process_group, "end a backward, or a forward without one")
        self._inner.close()

    def start_gather(self, group: WeightGroup, out: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event]) -> Any:
        self.agree(group.process_group, f"gather {_describe(group)}")
        return self._inner.start_gather(group, out, after)

    def finish_gather(self, ticket: Any) -> None:
        self._inner.finish_gather(ticket)

    def start_reduce(
        self,
        group: WeightGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> Any:
        self.agree(group.process_group, f"reduce the gradient of {_describe(group)} as {wgrads[0].dtype}")
        return self._inner.start_reduce(group, wgrads, into, accumulate, divisor)

    def finish_reduce(self, ticket: Any) -> None:
        self._inner.finish_reduce(ticket)

    def start_all_reduce(self, flat: torch.Tensor, process_groups: Sequence[dist.ProcessGroup]) -> Any:
        for process_group in process_groups:
            self.agree(process_group, f"reduce {flat.numel()} elements of replicated gradients")
        return self._inner.start_all_reduce(flat, process_groups)

    def finish_all_reduce(self, ticket: Any) -> None:
        self._inner.finish_all_reduce(ticket)

    def shutdown(self) -> None:
        self._inner.shutdown()


def _describe(group: WeightGroup) -> str:
    shapes = ", ".join(str((m.rows, *m.trailing)) for m in group.members[:2])
    return f"{group.name} {shapes}{', ...' if len(group.members) > 2 else ''}"

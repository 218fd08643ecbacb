"""`Transport`: how bytes move between ranks. The only caller of data collectives; everything above it is bookkeeping.

[Note: lines] A model's life alternates between stretches in which shards may change (the optimizer, a checkpoint load,
Megatron's buffers) and stretches in which gathers may read them (forward and backward). The runtime draws the line:
`open` when a forward begins, `close` when a backward (or a forward without one) has ended. No gather is in flight when
`close` returns, in the order of the current stream. Transports whose peers read this rank's memory without asking
exchange "published" at `open` and "finished reading" at `close`, once per line and not once per gather.
Calls between a `close` and the next `open` (a submodule called by hand) are bracketed by an `open`/`close` of their
own.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.runtime.group import WeightGroup
from gtp.runtime.in_place import Place


class Transport(abc.ABC):
    """Moves weights and gradients of `WeightGroup`s. One instance per runtime; all state hangs off it.

    Every method is called in the same order on all ranks of a group. On CUDA none of them blocks the host: work goes to
    side streams, and `finish_*` makes the current stream wait.
    """

    name: str
    """Shown by `runtime.stats()`: "process_group", "copy_engine", ..."""

    peers_read: bool = False
    """Whether peers read this rank's shards by themselves, from `open` on: then all must be current at `open`."""

    def agree(self, process_group: dist.ProcessGroup, what: str) -> None:
        """Debug check that all ranks of a group are about to do `what`. Does nothing unless overridden."""

    def prepare(self, groups: Sequence[WeightGroup]) -> None:
        """Once, when the model is sharded, in the same order on all ranks; may be collective.

        May move a shard to memory that it needs, by `member.shard`/`member.send` (the caller re-points the parameter to
        `member.shard` afterwards).
        """

    def place(self, group: WeightGroup) -> Place | None:
        """How to make buffers of which this rank's own shards are a part, or None: any memory will do."""
        return None

    def open(self, groups: Sequence[WeightGroup]) -> None:
        """Shards are current on this rank, in the order of the current stream, until `close`."""

    def now_current(self, group: WeightGroup) -> None:
        """Inside a line: shards of `group` were written after `open`, in the order of the current stream."""

    def close(self) -> None:
        """After this, in the order of the current stream, this rank's shards may be written."""

    @abc.abstractmethod
    def start_gather(self, group: WeightGroup, out: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event]) -> Any:
        """Starts gathering `member.send` of all ranks.

        Args:
            out: Over a buffer leased for `place(group)`. Per member `[size * shard_rows, *trailing]` in the compute
                dtype, contiguous; rank r's rows are `out[r * shard_rows : (r + 1) * shard_rows]`.
            after: `out` may be written once these are past. Empty on CPU.

        Returns:
            A ticket for `finish_gather`.
        """

    @abc.abstractmethod
    def finish_gather(self, ticket: Any) -> None:
        """The gathered weights are readable afterwards, in the order of the current stream. Once per ticket."""

    @abc.abstractmethod
    def start_reduce(
        self,
        group: WeightGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> Any:
        """Starts `into = (into if accumulate else 0) + sum over ranks(wgrads)[this rank's rows] / divisor`, per member.

        The sum is in fp32 (fp64 for fp64) in rank order and is rounded once, to `into`'s dtype. Reductions of one
        runtime complete in the order they were started.

        Args:
            wgrads: Per member `[size * shard_rows, *trailing]`, padding rows zero, contiguous, in the wire dtype. Not
                written by anybody until the ticket is finished.
            into: Per member `[shard_rows, *trailing]`, contiguous, any floating dtype. Kept alive by the ticket.
            accumulate: Per member, whether `into` holds a value to add to.
            divisor: 1 for a sum; group size times replicas for a mean.

        Returns:
            A ticket for `finish_reduce`.
        """

    @abc.abstractmethod
    def finish_reduce(self, ticket: Any) -> None:
        """`into` is complete and `wgrads` may be overwritten, in the order of the current stream.

        Once per ticket, in order of start.
        """

    def start_all_reduce(self, flat: torch.Tensor, process_groups: Sequence[dist.ProcessGroup]) -> Any:
        """Starts summing `flat` (1-d, fp32 or fp64; replicated gradients) in place over each group in turn."""
        works: list[dist.Work] = []
        for process_group in process_groups:
            for work in works:
                work.wait()
            works = [dist.all_reduce(flat, group=process_group, async_op=True)]
        return works

    def finish_all_reduce(self, ticket: Any) -> None:
        """`flat` is complete afterwards, in the order of the current stream."""
        for work in ticket:
            work.wait()

    def shutdown(self) -> None:
        """Gives back what the transport holds, threads among it. Called once, when the runtime is gone.

        In the order of the current stream, nothing is in flight afterwards: what gathers and reductions of an open line
        still read and write belongs to others then.
        """

"""`ReductionOrder`: whether all ranks have reduced the same weights in the same order, found out without a message.

A backward in which ranks use different weights of one size mixes their gradients, and no collective complains. So what
a rank reduces over a process group is folded into a few small numbers, which travel with the gradients of replicated
parameters, beside their squares. Over n ranks, n times the sum of squares is the square of the sum if and only if all
are equal. Every rank sees the same sums and so comes to the same verdict.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gtp.errors import DesyncError
from gtp.runtime.capture import current_capture
from gtp.runtime.group import WeightGroup

_BASE = 61  # squares below it, summed over 4096 ranks, are exact in fp32
_DIGITS = 6  # two orders are taken for one another once in 5e10 times
_MODULUS = _BASE**_DIGITS
_FACTOR = 1_000_003

WORDS = 2 * _DIGITS
"""How many numbers travel."""


class ReductionOrder:
    """Of one runtime, since its last backward ended.

    On a CPU the verdict comes before any gradient of the backward is delivered. On a GPU the host does not wait for the
    numbers: it comes when the next forward begins, or the next backward ends. Nothing is looked at while a CUDA graph
    is captured.
    """

    def __init__(self) -> None:
        self._seen: dict[dist.ProcessGroup, int] = {}
        self._sent: dict[tuple[dist.ProcessGroup, torch.dtype, torch.device], tuple[int, torch.Tensor]] = {}
        self._coming: list[tuple[torch.cuda.Event, torch.Tensor, int, str]] = []

    def note(self, group: WeightGroup) -> None:
        """A reduction of these weights begins."""
        seen = self._seen
        over = group.process_group
        seen[over] = (seen.get(over, 0) * _FACTOR + group.index + 1) % _MODULUS

    def reset(self) -> None:
        """A backward has ended."""
        self._seen.clear()

    def words(self, process_group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """What this rank says `[WORDS]`; None where nobody looks. The same tensor as long as the order is the same."""
        if current_capture(device):
            return None
        seen, key = self._seen.get(process_group, 0), (process_group, dtype, device)
        known = self._sent.get(key)
        if known is None or known[0] != seen:
            digits = [seen // _BASE**place % _BASE for place in range(_DIGITS)]
            values = [float(d) for d in digits] + [float(d * d) for d in digits]
            told = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
            known = self._sent[key] = seen, told.to(device, non_blocking=True)
        return known[1]

    def look(self, sums: torch.Tensor, ranks: int, names: str) -> None:
        """Judges what `words` of all ranks add up to, now or when it is there.

        Args:
            sums: `[WORDS]`.
            ranks: How many were added.
            names: Of their group.

        Raises:
            DesyncError: ranks have reduced different weights, or in another order.
        """
        if sums.device.type == "cpu":
            _judge(sums, ranks, names)
        elif not current_capture(sums.device):
            arrives = torch.empty(WORDS, dtype=sums.dtype, pin_memory=True)
            arrives.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming.append((event, arrives, ranks, names))

    def look_at_last(self) -> None:
        """Judges what has arrived from earlier backwards.

        Raises:
            DesyncError: as above.
        """
        while self._coming and self._coming[0][0].query():
            _, sums, ranks, names = self._coming.pop(0)
            _judge(sums, ranks, names)


def _judge(sums: torch.Tensor, ranks: int, names: str) -> None:
    values = [round(value) for value in sums.tolist()]
    for total, squares in zip(values[:_DIGITS], values[_DIGITS:], strict=True):
        if ranks * squares != total * total:
            raise DesyncError(
                f"the ranks of group {names} have reduced the gradients of different weights in one backward, or in "
                "another order, and so mixed them: gradients and gathered weights of that step are worthless. All "
                "ranks of a GTP group must use the same weights in the same order; a rank without work for a module "
                "must still run it (on an empty or masked input). GTPConfig(debug=True) names the first difference"
            )

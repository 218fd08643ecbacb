"""`ReductionOrder`: whether all ranks have reduced the same weights in the same order, found out without a message.

A backward in which ranks use different weights of one size mixes their gradients, and no collective complains. So what
a rank reduces over the axes of a group is folded into a few small numbers, which travel with the gradients of
replicated parameters over the same axes, beside their squares. Over n ranks, n times the sum of squares is the square
of the sum if and only if all are equal. Every rank sees the same sums and so comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gtp.errors import DesyncError
from gtp.runtime.group import WeightGroup

_BASE = 61  # squares below it, summed over as many ranks as this, are exact in fp32
_RANKS = 4096
_DIGITS = 6  # two orders are taken for one another once in 5e10 times
_MODULUS = _BASE**_DIGITS
_FACTOR = 1_000_003

_Axes = tuple[dist.ProcessGroup, ...]


class ReductionOrder:
    """Of one runtime, in its present backward.

    On a CPU alone: on a GPU the host would have to wait for the numbers, and `GTPConfig(debug=True)` is the way there.
    """

    def __init__(self) -> None:
        self._axes: dict[int, _Axes] = {}  # by index of the weight group
        self._seen: dict[_Axes, int] = {}

    def note(self, group: WeightGroup) -> None:
        """A reduction of these weights begins."""
        axes = self._axes.get(group.index)
        if axes is None:
            both = (group.process_group, group.replicate_group)
            axes = self._axes[group.index] = tuple(g for g in both if g is not None and g.size() > 1)
        if axes:  # what a group of one does is nobody else's business
            seen = self._seen
            seen[axes] = (seen.get(axes, 0) * _FACTOR + group.index + 1) % _MODULUS

    @property
    def any(self) -> bool:
        """Whether a reduction over other ranks was noted."""
        return bool(self._seen)

    def reset(self) -> None:
        """A backward has ended."""
        self._seen.clear()

    @staticmethod
    def count(device: torch.device, axes: Sequence[dist.ProcessGroup]) -> int:
        """How many numbers travel over these axes."""
        ranks = math.prod(group.size() for group in axes)
        return 2 * _DIGITS if device.type == "cpu" and ranks <= _RANKS else 0

    def put_into(self, words: torch.Tensor, axes: Sequence[dist.ProcessGroup]) -> None:
        """What this rank says, `words` being `[count]`."""
        if words.numel():
            seen = self._seen.get(tuple(axes), 0)
            digits = [seen // _BASE**place % _BASE for place in range(_DIGITS)]
            words.copy_(torch.tensor([*digits, *[d * d for d in digits]], dtype=words.dtype, device="cpu"))

    def judge(self, words: torch.Tensor, axes: Sequence[dist.ProcessGroup]) -> None:
        """
        Args:
            words: `[count]`, what all ranks say, added up.

        Raises:
            DesyncError: ranks have reduced different weights, or in another order.
        """
        ranks, values = math.prod(group.size() for group in axes), words.tolist()
        half = len(values) // 2
        for total, squares in zip(values[:half], values[half:], strict=True):
            if ranks * squares != total * total or not math.isfinite(total):  # exact in fp64
                names = " and ".join(group.group_name for group in axes)
                raise DesyncError(
                    f"the ranks of group {names} have reduced the gradients of different weights in one backward, or "
                    "in another order, and so mixed them: gathered weights and gradients of that step are worthless. "
                    "Zero the gradients. All ranks of a GTP group must use the same weights in the same order; a rank "
                    "without work for a module must still run it (on an empty or masked input). "
                    "GTPConfig(debug=True) names the first difference"
                )

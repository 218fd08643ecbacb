"""`ParameterReport`: what is sharded, what is not, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import nn

from gtp.weights.layout import ShardLayout
from gtp.weights.selection import Choice
from gtp.weights.served import NOT_SERVED


@dataclasses.dataclass(frozen=True)
class ParameterLine:
    """One parameter of the model.

    Attributes:
        name: First fully qualified name; `tied` has the others.
        shape: Logical shape.
        sharded: Whether this rank holds its rows only.
        ranks: Ranks that its rows are split over; 1 if replicated.
        local_bytes: Bytes on this rank, padding included.
        trained: Whether it required grad.
        reason: Why it was sharded or not.
    """

    name: str
    tied: tuple[str, ...]
    shape: tuple[int, ...]
    sharded: bool
    ranks: int
    local_bytes: int
    trained: bool
    reason: str

    @property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return math.prod(self.shape)

    @property
    def is_unserved(self) -> bool:
        """Whether it stays whole because of how its module uses it."""
        return not self.sharded and self.reason.endswith(NOT_SERVED)


@dataclasses.dataclass(frozen=True)
class ParameterReport:
    """All parameters of a sharded model, in order of registration.

    Attributes:
        lines: One per parameter of the model.
        unregistered: Parameters that modules keep in plain attributes, where torch does not see them. In no count.
    """

    lines: tuple[ParameterLine, ...]
    unregistered: tuple[ParameterLine, ...] = ()

    @staticmethod
    def of(
        choices: Sequence[Choice], layouts: Mapping[str, ShardLayout], unregistered: Mapping[str, nn.Parameter]
    ) -> ParameterReport:
        """From the selection that `shard_model` made."""
        lines = []
        for choice in choices:
            layout = layouts.get(choice.name)
            shape = layout.logical_shape if layout else tuple(choice.parameter.shape)
            local = layout.shard_shape if layout else shape
            lines.append(
                ParameterLine(
                    choice.name,
                    tuple(choice.names[1:]),
                    shape,
                    choice.sharded,
                    layout.group_size if layout else 1,
                    math.prod(local) * choice.parameter.dtype.itemsize,
                    choice.parameter.requires_grad,
                    choice.reason,
                )
            )
        return ParameterReport(tuple(lines), tuple(_unseen(name, p) for name, p in unregistered.items()))

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model, each once, without padding."""
        return sum(line.numel for line in self.lines)

    @property
    def local_bytes(self) -> int:
        """Bytes of parameters on this rank."""
        return sum(line.local_bytes for line in self.lines)

    def summary(self) -> str:
        """One line for a log."""
        sharded = [line for line in self.lines if line.sharded]
        return (
            f"{len(sharded)} of {len(self.lines)} parameters sharded, {self.num_parameters:,} elements in all, "
            f"{self.local_bytes / 2**20:.1f} MiB on this rank"
        )

    def __str__(self) -> str:
        width = max((len(line.name) for line in (*self.lines, *self.unregistered)), default=0)
        rows = [
            f"{line.name:<{width}}  {'1/' + str(line.ranks) if line.sharded else 'whole':>6}  "
            f"{line.shape!s:>16}  {line.reason}"
            for line in (*self.lines, *self.unregistered)
        ]
        return "\n".join([*rows, self.summary()])


def _unseen(name: str, parameter: nn.Parameter) -> ParameterLine:
    nbytes = parameter.numel() * parameter.dtype.itemsize
    reason = "kept in a plain attribute, where torch does not see it: use nn.ModuleList, ModuleDict or ParameterList"
    return ParameterLine(name, (), tuple(parameter.shape), False, 1, nbytes, parameter.requires_grad, reason)

"""Memory runs out while a weight is gathered. What was on its way is let go, and the next step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gtp
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide, inputs, settled, square


class _InOrder(nn.Module):
    """Layers run in an order that changes: what comes next is a surprise, gathered on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def _out_of_memory_at(pool: Any, lease: int) -> Any:
    """The `lease`-th lease of a pool from now on finds no memory. Returns what mends that."""
    real, count = pool.lease, [0]

    def failing(room: Any) -> Any:
        count[0] += 1
        if count[0] == lease:
            raise MemoryError("simulated")
        return real(room)

    pool.lease = failing
    return lambda: vars(pool).pop("lease")


def _leased(pool: Any) -> int:
    """Bytes in somebody's hands, when those of finished collectives have let go."""

    def look() -> int:
        pool.trim()
        return pool.leased_bytes

    return settled(look, lambda leased: leased == 0)


def _gathers() -> None:
    twins = SideBySide(_InOrder, config=gtp.GTPConfig(prefetch_bytes=8 * 8 * 4))
    pool = twins.runtime._pools.gathers
    for step in range(2):
        twins.step(inputs(step, 3, 8))
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        for lease in range(1, 6):
            twins.sharded.order = order
            mend = _out_of_memory_at(pool, lease)
            with pytest.raises(MemoryError, match="simulated"):
                square(twins.sharded, inputs(9, 3, 8)[rank()]).backward()
            mend()
            twins.sharded.order = [0, 1, 2, 3]
            twins.sharded.zero_grad()
            twins.runtime.release()
            assert _leased(pool) == 0
            twins.step(inputs(10 + lease, 3, 8))


def test_no_memory_for_a_gather_leaves_none_of_the_others_behind(ranks: Any) -> None:  # C48
    ranks(2).run(_gathers)


def _by_hand() -> None:
    twins = SideBySide(_InOrder)
    pool, transport, lines = twins.runtime._pools.gathers, twins.runtime.transport, []
    for line in ("open", "close"):
        real = getattr(transport, line)
        setattr(transport, line, lambda *args, line=line, real=real: (lines.append(line), real(*args))[1])
    mend = _out_of_memory_at(pool, 1)
    with torch.no_grad(), pytest.raises(MemoryError, match="simulated"):
        twins.sharded.layers[1](inputs(0, 3, 8)[rank()])
    mend()
    assert lines == ["open", "close"]
    twins.step(inputs(1, 3, 8))
    assert lines == ["open", "close"] * 2
    assert _leased(pool) == 0


def test_no_memory_for_a_layer_called_by_hand_leaves_no_line_open(ranks: Any) -> None:
    """With peer copies the next forward was refused, and this rank's peers waited for it to have finished reading."""
    ranks(2).run(_by_hand)

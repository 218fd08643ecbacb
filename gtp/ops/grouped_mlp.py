"""`grouped_mlp`: two linears per expert with an activation between them, over two weight groups.

The groups stay two on purpose. Each is gathered at once, just before its GEMMs, and the schedule that sees the first
consumed has the second gathered under the first's GEMMs; one group of all weights would have to be whole before the
first GEMM starts, and would keep twice the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from gtp.errors import GTPValueError
from gtp.ops.grouped_linear import grouped_linear, row_splits
from gtp.ops.swiglu import silu_and_mul_halves

Activation = Literal["swiglu"] | Callable[[torch.Tensor], torch.Tensor]


def grouped_mlp(
    input: torch.Tensor,
    m_splits: Sequence[int] | torch.Tensor,
    fc1_weights: Sequence[torch.Tensor],
    fc2_weights: Sequence[torch.Tensor],
    *,
    activation: Activation = "swiglu",
) -> torch.Tensor:
    """`fc2_e(activation(fc1_e(input_e)))` for consecutive blocks of rows `input_e`, one per expert e.

    Rows after the last block are padding: they have no effect, and their output and gradient are zero.

    Args:
        input: `[*, in]`; leading dims are flattened to rows.
        m_splits: Rows per expert.
        fc1_weights: One group, per expert `[2 H, in]` with gate in the first H rows and up in the others ("swiglu"), or
            `[H, in]`; distributed or plain.
        fc2_weights: Another group, per expert `[out, H]`.
        activation: "swiglu", or a function from `[rows, H]` to `[rows, H]` that maps zero rows to finite ones.

    Returns:
        `[*, out]`.

    Raises:
        GTPValueError: an unknown activation, or splits, weights and shapes that do not go together.
    """
    check_activation(activation)
    splits = row_splits(m_splits)
    hidden = grouped_linear(input, splits, fc1_weights)
    if callable(activation):
        hidden = activation(hidden)
    else:
        hidden = silu_and_mul_halves(hidden, num_rows=sum(splits))
    return grouped_linear(hidden, splits, fc2_weights)


def check_activation(activation: Activation) -> None:
    """
    Raises:
        GTPValueError: neither "swiglu" nor a function.
    """
    if activation != "swiglu" and not callable(activation):
        raise GTPValueError(f"grouped_mlp: activation must be 'swiglu' or a function of a tensor, got {activation!r}")

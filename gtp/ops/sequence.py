"""Rows and sequences: how `[batch, sequence, features]` becomes the rows of a GEMM whose sequence is split over ranks.

A gather puts the ranks' rows one after the other. They are one sequence again only if the sequence is the outermost dim
of the rows: with the batch outermost, rank 0's rows of sample 1 would follow rank 0's rows of sample 0, in the place
where rank 1's rows of sample 0 belong. So the sequence dim moves to the front before rows are flattened, and back
after. For a batch of one, and for sequence-first activations, this moves no data.
"""

from __future__ import annotations

import torch

from gtp.errors import GTPValueError


def rows_of(x: torch.Tensor, sequence_dim: int, who: str) -> torch.Tensor:
    """`x [..., K]` as rows `[tokens, K]`, the sequence dim outermost. A view where strides allow it.

    Raises:
        GTPValueError: fewer than two dims, or a sequence dim that is the last one or does not exist.
    """
    dim = _checked_dim(x, sequence_dim, who)
    if x.ndim == 2:
        return x
    return x.movedim(dim, 0).flatten(0, -2)


def from_rows(rows: torch.Tensor, like: torch.Tensor, sequence_dim: int, sequence: int) -> torch.Tensor:
    """Rows `[sequence * others, N]` as `like`'s dims, with `sequence` along the sequence dim and N features.

    Args:
        like: The tensor whose rows went in, for its other dims.
        sequence: Length of the sequence dim of the result.
    """
    if like.ndim == 2:
        return rows
    dim = sequence_dim % like.ndim
    others = [size for index, size in enumerate(like.shape[:-1]) if index != dim]
    return rows.view(sequence, *others, rows.shape[-1]).movedim(0, dim)


def _checked_dim(x: torch.Tensor, sequence_dim: int, who: str) -> int:
    if x.ndim < 2:
        raise GTPValueError(f"{who}: x must have at least a sequence and a feature dim, got shape {tuple(x.shape)}")
    if not -x.ndim <= sequence_dim < x.ndim:
        raise GTPValueError(f"{who}: sequence_dim {sequence_dim} does not exist in x of shape {tuple(x.shape)}")
    dim = sequence_dim % x.ndim
    if dim == x.ndim - 1:
        raise GTPValueError(
            f"{who}: sequence_dim {sequence_dim} is the last dim of x {tuple(x.shape)}, which holds the features that "
            f"the GEMM contracts. The collective runs over the sequence: one of dims 0 to {x.ndim - 2}"
        )
    return dim

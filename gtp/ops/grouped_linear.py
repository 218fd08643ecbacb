"""`grouped_linear`: one linear per expert, over weights that are gathered together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F

from gtp.errors import GTPValueError, UnsupportedError
from gtp.ops._common import (
    apply_of,
    as_rows,
    autocast_dtype,
    autocast_to,
    check_dtype,
    check_rows,
    finish_wgrads,
    is_managed,
    is_surely_plain,
    is_wanted,
    main_grad_dtype,
    plain_access,
    refuse_distributed,
    refuse_double_backward,
    refused_input,
    wgrad_buffers,
    write_wgrad,
)
from gtp.ops.compilers import never_compiled, outside_graphs
from gtp.ops.linear import check_shapes
from gtp.ops.versions import ShardVersions
from gtp.protocol import (
    describe_weight,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)


def grouped_linear(
    input: torch.Tensor,
    m_splits: Sequence[int] | torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """`linear(input_e, weights[e], biases[e])` for consecutive blocks of rows `input_e`, one per expert e.

    The weights are one group, leader first: gathered together, reduced together. An expert without tokens gets a wgrad
    of exact zeros. Rows after the last block are padding: whatever they hold, NaN included, their output and their
    gradient are zero, and nothing else depends on them. Otherwise as `gtp.ops.linear`, wgrads first.

    One GEMM per expert; on CUDA in bf16 without biases, where full weights lie evenly spaced in one buffer (as gtp's
    runtime gathers a group), forward and dgrad are one grouped GEMM each.

    Args:
        input: `[*, in]`; leading dims are flattened to rows.
        m_splits: Rows per expert, `len(weights)` whole numbers: a sequence, an array or a 1-d tensor. A tensor on a GPU
            is read to the host, which synchronizes.
        weights: Distributed `[shard_rows, in]`, each this rank's rows of its full `[out, in]`; or plain `[out, in]`.
            Distributed ones in the order of their group, all of it: the leader answers for all.
        biases: `[out]` per expert, plain, replicated.

    Returns:
        `[*, out]`.

    Raises:
        GTPValueError: splits, weights, biases or shapes do not go together; more rows in the splits than in the input.
        UnsupportedError: some weights of the group are distributed or trainable and others not; double backward.
        GTPStateError: in backward, a weight was written after the forward.
    """
    bias_list: list[torch.Tensor] = [] if biases is None else list(biases)
    refuse_distributed("grouped_linear", input=input)
    for bias in bias_list:
        refuse_distributed("grouped_linear", biases=bias)
    splits = row_splits(m_splits)
    _check_counts(weights, splits, biases)
    _check_rows(splits, math.prod(input.shape[:-1]))
    if all(is_surely_plain(w) for w in weights):
        return _plain(input, splits, weights, bias_list)
    return _managed_grouped_linear(input, splits, list(weights), bias_list)


def row_splits(m_splits: Sequence[int] | torch.Tensor) -> list[int]:
    """Rows per expert as numbers on the host, from a sequence, an array or a 1-d tensor of whole numbers of any dtype.

    Raises:
        GTPValueError: anything else.
    """
    given = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
    try:
        splits = [int(n) for n in given]
        whole = not isinstance(given, (str, Mapping)) and all(a == b for a, b in zip(splits, given, strict=True))
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise GTPValueError(f"m_splits must be whole numbers of rows, one per expert, got {m_splits!r}")
    if any(n < 0 for n in splits):
        raise GTPValueError(f"m_splits must not be negative, got {splits}")
    return splits


def _check_counts(weights: Sequence[torch.Tensor], splits: list[int], biases: Sequence[torch.Tensor] | None) -> None:
    if not weights:
        raise GTPValueError("grouped_linear needs at least one weight")
    if len(splits) != len(weights):
        raise GTPValueError(f"m_splits has {len(splits)} entries for {len(weights)} weights; give one per expert")
    if biases is not None and len(biases) != len(weights):
        raise GTPValueError(
            f"biases has {len(biases)} entries for {len(weights)} weights; give one per expert, or None"
        )


def _check_rows(splits: list[int], rows: int) -> None:
    if sum(splits) > rows:
        raise GTPValueError(
            f"m_splits {splits} add up to {sum(splits)} rows, the input has {rows}. They may add up to fewer (the rest "
            "is padding), not to more"
        )


def _plain(
    x: torch.Tensor, splits: list[int], weights: Sequence[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    rows = as_rows(x)
    *blocks, tail = rows.split([*splits, rows.shape[0] - sum(splits)])
    out = [F.linear(block, weights[i], biases[i] if biases else None) for i, block in enumerate(blocks)]
    out.append(out[0].new_zeros(tail.shape[0], out[0].shape[1]))
    return torch.cat(out).view(*x.shape[:-1], out[0].shape[1])


@outside_graphs
def _managed_grouped_linear(
    x: torch.Tensor, splits: list[int], weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> torch.Tensor:
    if not any(is_managed(w) for w in weights):
        return _plain(x, splits, weights, biases)
    trainable = _check_group(x, weights)
    dtype = autocast_dtype(x)
    x = autocast_to(x, dtype)
    biases = [autocast_to(b, dtype) for b in biases]
    if torch.is_grad_enabled() and (trainable or x.requires_grad or any(b.requires_grad for b in biases)):
        if x.layout is not torch.strided or x.is_nested:
            raise refused_input(weights[0], x)
        return _apply(x, splits, dtype, len(weights), *weights, *biases)
    with torch.no_grad():
        return _forward(x, splits, weights, biases, dtype)


def _check_group(x: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Whether the group is trainable; found out, and everything else checked, before any collective."""
    with plain_access():
        shapes = [w.shape for w in weights]
        trainable = [w.requires_grad for w in weights]
    distributed = [is_distributed_weight(w) for w in weights]
    for what, flags in (("distributed", distributed), ("trainable", trainable)):
        if len(set(flags)) > 1:
            odd = weights[flags.index(not flags[0])]
            raise UnsupportedError(
                f"{describe_weight(odd)}: weights of one group are gathered and reduced together, and of this group "
                f"some are {what} and others not. Make them alike"
            )
    common: object = None
    for position, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
        check_shapes(x, weight, shape)
        # asked of the class: the contract has no such member, and an instance may refuse what is not in it
        if not hasattr(type(weight), "place_in_group"):
            continue
        group, own = weight.place_in_group  # type: ignore[attr-defined]
        common = group if position == 0 else common
        if group is not common or own != position:
            if group is common:
                what = f"it is weight {own} of those that are gathered together, and was given as weight {position}"
            else:
                leader = describe_weight(weights[0])
                what = f"it was given as weight {position} with {leader}, which it is not gathered with"
            raise GTPValueError(
                f"{describe_weight(weight)}: {what}. Give all weights of one group in their order (to use them in "
                "another one, move the rows of the input); weights that were sharded one by one go to gtp.ops.linear"
            )
    return trainable[0]


def _full_weights(
    gathered: list[torch.Tensor], weights: list[torch.Tensor], x: torch.Tensor, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    full = [autocast_to(g, dtype) for g in gathered]
    for weight, tensor in zip(weights, full, strict=True):
        check_dtype(weight, tensor, x)
        if tensor.shape != full[0].shape:
            raise GTPValueError(
                f"{describe_weight(weight)}: full weights of one group must have one shape, got {tuple(tensor.shape)} "
                f"and {tuple(full[0].shape)}"
            )
    return full


def _forward(
    x: torch.Tensor,
    splits: list[int],
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    dtype: torch.dtype | None,
) -> torch.Tensor:
    full = _full_weights(materialize_weight_for_forward(weights), weights, x, dtype)
    rows = as_rows(x)
    stacked = None if biases else _stacked(rows, full)
    if stacked is None:
        return _plain(x, splits, full, biases)
    y = F.grouped_mm(rows, stacked.transpose(1, 2), offs=_ends(splits, rows.device))
    y[sum(splits) :].zero_()
    return y.view(*x.shape[:-1], y.shape[1])


class _GroupedLinear(torch.autograd.Function):
    """
    Per expert e of E, on its rows x_e `[m_e, in]`: W_e `[out, in]` full, shard `[shard_rows, in]`, b_e `[out]`,
    y_e and dy_e `[m_e, out]`.

    forward   y_e = x_e W_e^T + b_e
    wgrad     dy_e^T x_e, all of them before one finalize for the group
    dbias     sum of dy_e over rows
    dgrad     dy_e W_e, the group gathered again

    Saved: x if the group is trainable; weights as attributes ([Note: weights stay out of save_for_backward]).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        splits: list[int],
        dtype: torch.dtype | None,
        experts: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = list(parameters[:experts]), list(parameters[experts:])
        y = _forward(x, splits, weights, biases, dtype)
        ctx.weights = weights
        ctx.splits = splits
        ctx.autocast = dtype is not None
        ctx.x_shape = x.shape
        if ctx.needs_input_grad[4]:
            ctx.save_for_backward(x)
        if ctx.needs_input_grad[0]:
            ctx.versions = ShardVersions(weights)
        return y.data if y._is_view() else y  # [Note: outputs are no views] in gtp/ops/_common.py

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, splits, experts = ctx.weights, ctx.splits, len(ctx.weights)
        refuse_double_backward(weights)
        need_x = ctx.needs_input_grad[0]
        need_biases = ctx.needs_input_grad[4 + experts :]  # empty without biases
        if need_x:
            ctx.versions.check(weights)
        dy_rows = as_rows(dy)
        dweights: list[torch.Tensor | None] = [None] * experts
        if any(is_wanted(ctx, 1 + i) for i in range(experts)):
            (x,) = ctx.saved_tensors
            dweights = _weight_gradients(weights, splits, dy_rows, as_rows(x), rounded=ctx.autocast)
        blocks = _blocks(splits)
        dbiases = [dy_rows[slice(*blocks[i])].sum(0) if need else None for i, need in enumerate(need_biases)]
        dx = _input_gradient(weights, splits, dy_rows).view(ctx.x_shape) if need_x else None
        return dx, None, None, None, *dweights, *dbiases


_apply: Final = apply_of(_GroupedLinear)


def _weight_gradients(
    weights: list[torch.Tensor], splits: list[int], dy_rows: torch.Tensor, x_rows: torch.Tensor, *, rounded: bool
) -> list[torch.Tensor | None]:
    buffers = wgrad_buffers(weights, dy_rows.shape[1])
    wgrads = []
    for weight, buffer, (start, stop) in zip(weights, buffers, _blocks(splits), strict=True):
        wide = None if rounded else main_grad_dtype(weight) if buffer is None else buffer.dtype
        wgrads.append(write_wgrad(dy_rows[start:stop], x_rows[start:stop], buffer, wide))
    return finish_wgrads(weights, wgrads)


def _input_gradient(weights: list[torch.Tensor], splits: list[int], dy_rows: torch.Tensor) -> torch.Tensor:
    gathered = materialize_weight_for_backward(weights)
    check_rows(weights, gathered, dy_rows.shape[1], "materialize_group_for_backward")
    full = [autocast_to(g, dy_rows.dtype) for g in gathered]
    stacked = _stacked(dy_rows, full)
    if stacked is None:
        # Not written where it belongs at once: how a GEMM rounds may depend on where its output begins.
        *blocks, tail = dy_rows.split([*splits, dy_rows.shape[0] - sum(splits)])
        parts = [block.mm(weight) for block, weight in zip(blocks, full, strict=True)]
        return torch.cat([*parts, parts[0].new_zeros(tail.shape[0], parts[0].shape[1])])
    dx = F.grouped_mm(dy_rows, stacked, offs=_ends(splits, dy_rows.device))
    dx[sum(splits) :].zero_()
    return dx


def _blocks(splits: list[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(splits))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _ends(splits: list[int], device: torch.device) -> torch.Tensor:
    """Where each expert's rows end, `[experts]` int32, without a copy from the host, which a CUDA graph cannot capture.

    The numbers travel as arguments of the kernel.
    """
    ends = torch.zeros(len(splits), dtype=torch.int32, device=device)
    torch._foreach_add_(ends.unbind(), list(accumulate(splits)))
    return ends


def _grouped_gemm_serves(rows: torch.Tensor) -> bool:
    """Whether this device has a grouped GEMM for such rows: bf16 on CUDA from compute capability 9.0 on."""
    return rows.is_cuda and rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (9, 0)


def _stacked(rows: torch.Tensor, full: list[torch.Tensor]) -> torch.Tensor | None:
    """The full weights as one tensor `[experts, out, in]` without a copy, where the grouped GEMM serves; else None.

    It takes matrices whose rows start at multiples of 16 bytes, at one distance from each other.
    """
    first = full[0]
    if len(full) < 2 or not rows.numel() or not rows.is_contiguous() or not _grouped_gemm_serves(rows):
        return None
    if rows.data_ptr() % 16 or first.data_ptr() % 16 or first.shape[0] % 8 or first.shape[1] % 8:
        return None
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    step = full[1].storage_offset() - start
    if step < first.numel() or step % 8:
        return None
    for i, weight in enumerate(full):
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != start + i * step:
            return None
    return first.as_strided((len(full), *first.shape), (step, *first.stride()))

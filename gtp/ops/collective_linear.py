"""Linear layers of tensor parallelism with the sequence-parallel collective folded in.

Legend. R ranks, this one r. M rows (tokens), K in features, N out features, all unsharded counts; a suffix says which
of them is split over the ranks: `x_shard_m` is `[M/R, K]`, this rank's M/R rows; no suffix means all of it.

                        AllGatherLinear                             LinearReduceScatter
    x                   x_shard_m [M/R, K]                          x_shard_k [M, K/R]
    weight, bias        w_shard_n [N/R, K], b_shard_n [N/R]         w_shard_k [N, K/R], b [N], equal on all ranks
    forward             x = all-gather(x_shard_m)                   y_shard_m = b + reduce-scatter(
                        y_shard_n = x w_shard_n^T + b_shard_n                       x_shard_k w_shard_k^T)
    y                   y_shard_n [M, N/R]                          y_shard_m [M/R, N]
    wgrad               x^T = all-gather(x_shard_k^T)               dy = all-gather(dy_shard_m), serves dgrad too
                        dw_shard_n = dy_shard_n^T x                 dw_shard_k = dy^T x_shard_k
    dgrad               dx_shard_m = reduce-scatter(                dx_shard_k = dy w_shard_k
                                     dy_shard_n w_shard_n)
    bias gradient       sum of rows of dy_shard_n: no collective    sum of rows of dy: no collective, whole on all ranks
    saved               w_shard_n, x_shard_k [M, K/R]               w_shard_k, x_shard_k
    collectives         forward 1; backward 1 for wgrad,            forward 1; backward 1
                        1 for dgrad

Sums over ranks are sums, never means. A weight's gradient is a sum over M in one GEMM's accumulator (fp32 for bf16).

[Note: the saved slice] AllGatherLinear needs the whole x again for wgrad. It saves this rank's K-slice of it, which is
as many bytes as its input. K is then a dim of the *result* of the wgrad GEMM, so the slices that arrive are GEMMs of
their own, and no partial sums have to be added up across them, as there would be if the rows were gathered again.
What is gathered is its transpose, whose rows are features; whether that means moving data is the backend's affair.

[Note: wgrad first] For a weight that is distributed itself, AllGatherLinear's backward computes wgrad, hands it in, and
only then asks for the weight again. LinearReduceScatter does the same, unless the backend hides its gather under a
GEMM: then that GEMM must be dgrad, because wgrad contracts over the rows that are still on their way.

Weights are plain tensors or `DistributedWeight`s, `[..., K]`; leading dims are flattened into N. In a distributed
weight N/R or N is that of the full weight, which is gathered over a group of its own while the activation is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gtp.errors import GTPValueError
from gtp.ops._collective_common import (
    KeptWeights,
    WgradTarget,
    autocast_operands,
    backward_matrix,
    check_dtypes,
    check_operands,
    forward_matrix,
    written_wgrad,
)
from gtp.ops._common import autocast_dtype, is_wanted, refused_double_backward
from gtp.ops._spmd_rules import gather_multi_rule, gather_rule, scatter_rule
from gtp.ops.collective_backends import Factor, GemmBackend
from gtp.ops.compilers import never_compiled, outside_graphs
from gtp.ops.sequence import from_rows, rows_of
from gtp.protocol import is_distributed_weight

_Optional = torch.Tensor | None


class AllGatherLinear(torch.autograd.Function):
    """`y_shard_n = all-gather(x_shard_m) w_shard_n^T + b_shard_n`. Shapes and collectives: see the file's table."""

    spmd_typecheck = staticmethod(gather_rule)

    @staticmethod
    def forward(
        ctx: Any,
        x_shard_m: torch.Tensor,
        weight: torch.Tensor,
        bias: _Optional,
        backend: GemmBackend,
        autocast: torch.dtype | None,
    ) -> torch.Tensor:
        """
        Args:
            x_shard_m: `[M/R, K]`.
            weight: `[N/R, K]`.
            bias: `[N/R]` or None.
            backend: Moves the activations.
            autocast: Its dtype where it is on; x and bias have it already.

        Returns:
            `[M, N/R]`.
        """
        keep = ctx.needs_input_grad[1]
        ys, x_shard_k = _gather_forward(backend, x_shard_m, [weight], [bias], autocast, keep=keep)
        _keep(ctx, backend, autocast, x_shard_k, [weight])
        return ys[0]

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[_Optional, ...]:
        needs = ctx.needs_input_grad
        dx, dweights, dbiases = _gather_backward(ctx, [dy], needs[0], [is_wanted(ctx, 1)], needs[2:3])
        return dx, *dweights, *dbiases, None, None


class AllGatherLinearMulti(torch.autograd.Function):
    """Several `AllGatherLinear`s of one input: one gather forward, and still two collectives backward.

    The input's gradient is the sum over weights, added in the GEMMs' accumulators before it is reduce-scattered. An
    output that the loss does not use contributes nothing, and its weight gets no gradient, as with separate layers.
    """

    spmd_typecheck = staticmethod(gather_multi_rule)

    @staticmethod
    def forward(
        ctx: Any,
        backend: GemmBackend,
        autocast: torch.dtype | None,
        x_shard_m: torch.Tensor,
        *weights_then_biases: Any,
    ) -> Any:
        """
        Args:
            x_shard_m: `[M/R, K]`.
            weights_then_biases: As many weights `[N_i/R, K]` as biases `[N_i/R]` or None.

        Returns:
            A tuple of `[M, N_i/R]`.
        """
        count = len(weights_then_biases) // 2
        weights, biases = weights_then_biases[:count], weights_then_biases[count:]
        keep = any(ctx.needs_input_grad[3 : 3 + count])
        ys, x_shard_k = _gather_forward(backend, x_shard_m, weights, biases, autocast, keep=keep)
        _keep(ctx, backend, autocast, x_shard_k, weights)
        # an unused output must not cost GEMMs on zeros
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *dys: _Optional) -> tuple[_Optional, ...]:
        needs, count = ctx.needs_input_grad, len(dys)
        needs_dw = [is_wanted(ctx, 1 + i) for i in range(count)]
        dx, dweights, dbiases = _gather_backward(ctx, dys, needs[2], needs_dw, needs[3 + count :])
        return None, None, dx, *dweights, *dbiases


class LinearReduceScatter(torch.autograd.Function):
    """`y_shard_m = reduce-scatter(x_shard_k w_shard_k^T) + b`. Shapes and collectives: see the file's table."""

    spmd_typecheck = staticmethod(scatter_rule)

    @staticmethod
    def forward(
        ctx: Any,
        x_shard_k: torch.Tensor,
        weight: torch.Tensor,
        bias: _Optional,
        backend: GemmBackend,
        autocast: torch.dtype | None,
    ) -> torch.Tensor:
        """
        Args:
            x_shard_k: `[M, K/R]`.
            weight: `[N, K/R]`.
            bias: `[N]` or None, the same on all ranks. Added once, after the sum over ranks.
            backend: Moves the activations.
            autocast: Its dtype where it is on; x and bias have it already.

        Returns:
            `[M/R, N]`.
        """
        _keep(ctx, backend, autocast, x_shard_k if ctx.needs_input_grad[1] else None, [weight])
        return _scatter_forward(backend, x_shard_k, weight, bias, autocast)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, dy_shard_m: torch.Tensor) -> tuple[_Optional, ...]:
        backend: GemmBackend = ctx.backend
        needs_dx, _, needs_db, *_ = ctx.needs_input_grad
        needs_dw = is_wanted(ctx, 1)
        x_shard_k, [weight] = _kept(ctx, check=needs_dx)
        dx = dw = db = None
        whole = needs_dw or needs_db
        # a weight that is distributed is waited for first
        width = 0 if not needs_dx or is_distributed_weight(weight) else weight.shape[-1]
        with backend.gather(dy_shard_m.contiguous(), whole=whole, width=width) as gathering:
            # see [Note: wgrad first]
            if needs_dx and backend.gathers_under_matmul:
                dx = gathering.matmul([Factor(backward_matrix(weight, dy_shard_m))])[0]
            if needs_dw:
                dw = written_wgrad(weight, gathering.full(), x_shard_k, rounded=ctx.autocast)
            if needs_dx and dx is None:
                dx = gathering.matmul([Factor(backward_matrix(weight, dy_shard_m))])[0]
            if needs_db:
                db = gathering.full().sum(0)
        return dx, dw, db, None, None


@outside_graphs
def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: GemmBackend,
    sequence_dim: int = 0,
) -> torch.Tensor:
    """Column-parallel linear of a sequence-sharded input: gathers the sequence, multiplies, one GEMM.

    Args:
        x: `[..., K]` with 1/R of the sequence along `sequence_dim`; equal lengths on all ranks.
        weight: `[N/R, K]`, plain or distributed.
        bias: `[N/R]` or None.
        backend: Moves the activations; knows the group.
        sequence_dim: Any dim of `x` but the last.

    Returns:
        `[..., N/R]` with the whole sequence along `sequence_dim`.

    Raises:
        GTPValueError: shapes or dtypes that do not fit; K not a multiple of R (see [Note: the saved slice]).
        UnsupportedError: in backward, a second derivative is asked for (create_graph=True).
        DesyncError: ranks come with different shapes (see `Agreement` for when this is noticed).
    """
    return _all_gather(x, [weight], [bias], backend, sequence_dim)[0]


@outside_graphs
def all_gather_linear_multi(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    backend: GemmBackend,
    sequence_dim: int = 0,
) -> tuple[torch.Tensor, ...]:
    """As `all_gather_linear`, for several weights of one input, with one gather. Returns one output per weight."""
    return _all_gather(x, weights, biases, backend, sequence_dim)


def _all_gather(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[_Optional] | None,
    backend: GemmBackend,
    sequence_dim: int,
) -> tuple[torch.Tensor, ...]:
    who = "all_gather_linear"
    if not weights:
        raise GTPValueError(f"{who}: weights must not be empty")
    if biases is None:
        biases = [None] * len(weights)
    if len(biases) != len(weights):
        raise GTPValueError(f"{who}: got {len(biases)} biases for {len(weights)} weights: one each, or None")
    for weight, bias in zip(weights, biases, strict=True):
        check_operands(who, x, weight, bias, backend, bias_in_gemm=True)
    if x.shape[-1] % backend.size:
        raise GTPValueError(
            f"{who}: {x.shape[-1]} in features do not split over {backend.size} ranks: backward exchanges slices of "
            "them. Use a multiple, or a smaller tensor-parallel group"
        )
    autocast = autocast_dtype(x)
    x_rows = x if x.ndim == 2 and sequence_dim == 0 else rows_of(x, sequence_dim, who)
    if autocast is not None:
        x_rows, weights, biases = autocast_operands(autocast, x_rows, weights, biases)
    check_dtypes(who, x_rows, weights, biases)
    if not torch.is_grad_enabled():
        ys: Sequence[torch.Tensor] = _gather_forward(backend, x_rows, weights, biases, autocast, keep=False)[0]
    elif len(weights) == 1:
        ys = [AllGatherLinear.apply(x_rows, weights[0], biases[0], backend, autocast)]  # type: ignore[no-untyped-call]
    else:
        ys = AllGatherLinearMulti.apply(backend, autocast, x_rows, *weights, *biases)  # type: ignore[no-untyped-call]
    if x.ndim == 2:
        return tuple(ys)
    sequence = x.shape[sequence_dim] * backend.size
    return tuple([from_rows(y, x, sequence_dim, sequence) for y in ys])


@outside_graphs
def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: GemmBackend,
    sequence_dim: int = 0,
) -> torch.Tensor:
    """Row-parallel linear with a sequence-sharded output: multiplies, sums over ranks, keeps this rank's rows.

    Args:
        x: `[..., K/R]` with the whole sequence along `sequence_dim`.
        weight: `[N, K/R]`, plain or distributed.
        bias: `[N]` or None, the same on all ranks; its gradient is whole on every rank too.
        backend: Moves the activations; knows the group.
        sequence_dim: Any dim of `x` but the last.

    Returns:
        `[..., N]` with 1/R of the sequence along `sequence_dim`.

    Raises:
        GTPValueError: shapes or dtypes that do not fit; a sequence that does not split over the ranks.
        UnsupportedError: in backward, a second derivative is asked for (create_graph=True).
        DesyncError: ranks come with different shapes (see `Agreement` for when this is noticed).
    """
    who = "linear_reduce_scatter"
    check_operands(who, x, weight, bias, backend, bias_in_gemm=False)
    x_rows = x if x.ndim == 2 and sequence_dim == 0 else rows_of(x, sequence_dim, who)
    sequence = x.shape[sequence_dim]
    if sequence % backend.size:
        raise GTPValueError(
            f"{who}: a sequence of {sequence} (dim {sequence_dim} of x {tuple(x.shape)}) does not split over "
            f"{backend.size} ranks: pad it to a multiple"
        )
    autocast = autocast_dtype(x)
    if autocast is not None:
        x_rows, [weight], [bias] = autocast_operands(autocast, x_rows, [weight], [bias])
    check_dtypes(who, x_rows, [weight], [bias])
    if torch.is_grad_enabled():
        y = LinearReduceScatter.apply(x_rows, weight, bias, backend, autocast)  # type: ignore[no-untyped-call]
    else:
        y = _scatter_forward(backend, x_rows, weight, bias, autocast)
    return y if x.ndim == 2 else from_rows(y, x, sequence_dim, sequence // backend.size)


def _gather_forward(
    backend: GemmBackend,
    x_shard_m: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[_Optional],
    autocast: torch.dtype | None,
    *,
    keep: bool,
) -> tuple[list[torch.Tensor], _Optional]:
    """Outputs `[M, N_i/R]` and, if `keep`, the saved slice `[M, K/R]`."""
    width = 0
    if not any(map(is_distributed_weight, weights)):
        width = sum([weight.numel() for weight in weights]) // max(x_shard_m.shape[1], 1)
    with backend.gather(x_shard_m.contiguous(), columns=keep, width=width) as gathering:
        # each weight leads a group of its own; their gathers and the activation's are under way together
        matrices = [forward_matrix(weight, x_shard_m, autocast) for weight in weights]
        ys = gathering.matmul([Factor(w.t(), bias) for w, bias in zip(matrices, biases, strict=True)])
        return ys, gathering.columns() if keep else None


def _gather_backward(
    ctx: Any, dys: Sequence[_Optional], needs_dx: bool, needs_dw: Sequence[bool], needs_db: Sequence[bool]
) -> tuple[_Optional, list[_Optional], list[_Optional]]:
    """Gradients of input, weights and biases; dys are `[M, N_i/R]`, None where an output was not used."""
    backend: GemmBackend = ctx.backend
    x_shard_k, weights = _kept(ctx, check=needs_dx)
    used = [(weight, dy) for weight, dy in zip(weights, dys, strict=True) if dy is not None]
    dweights: list[_Optional] = [None] * len(dys)
    wanted = [
        (i, dy, WgradTarget(weights[i], dy.shape[1], x_shard_k, rounded=ctx.autocast))
        for i, dy in enumerate(dys)
        if dy is not None and needs_dw[i]
    ]
    if wanted:
        width = sum([dy.shape[1] for _, dy, _ in wanted])
        # hooks may hand back another layout
        with backend.gather(x_shard_k.contiguous().t(), width=width) as gathering:
            gathering.matmul([Factor(dy, out=target.matrix.t()) for _, dy, target in wanted])
        for i, _, target in wanted:
            dweights[i] = target.finish()
    dx = None
    if needs_dx and used:
        dx = backend.matmul_reduce_scatter([(dy, backward_matrix(weight, dy)) for weight, dy in used])
    dbiases = [dy.sum(0) if needed and dy is not None else None for dy, needed in zip(dys, needs_db, strict=True)]
    return dx, dweights, dbiases


def _scatter_forward(
    backend: GemmBackend, x_shard_k: torch.Tensor, weight: torch.Tensor, bias: _Optional, autocast: torch.dtype | None
) -> torch.Tensor:
    y = backend.matmul_reduce_scatter([(x_shard_k, forward_matrix(weight, x_shard_k, autocast).t())])
    return y if bias is None else y.add_(bias)


def _keep(
    ctx: Any, backend: GemmBackend, autocast: torch.dtype | None, x: _Optional, weights: Sequence[torch.Tensor]
) -> None:
    ctx.backend = backend
    ctx.autocast = autocast is not None
    ctx.kept = KeptWeights(weights)
    ctx.save_for_backward(x, *ctx.kept.for_saving)


def _kept(ctx: Any, *, check: bool) -> tuple[Any, list[torch.Tensor]]:
    """What `_keep` was given: x, or None if no weight needed it, and the weights. First thing in backward.

    Raises:
        UnsupportedError: backward runs with create_graph=True (see `refuse_double_backward`).
    """
    x, *saved = ctx.saved_tensors
    weights = ctx.kept.back(saved)
    if torch.is_grad_enabled():
        raise refused_double_backward(
            weights[0],
            "activations do not stay gathered for it",
            "gather and scatter the sequence with gtp.ops.gather_sequence and gtp.ops.reduce_scatter_sequence around "
            "a plain linear",
        )
    if check:
        ctx.kept.check_unchanged()
    return x, weights

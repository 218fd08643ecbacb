"""The edges of a sequence-parallel region: where activations become a rank's part of the sequence, and whole again.

Between the parallel linears, norms and residuals run on `[..., S/R, ...]`, this rank's part of the sequence. At the
edges something has to be said about gradients: a part of the gradient and the whole of it have the same shape. In
words:

    op                        forward          backward
    split_sequence            this rank's part all-gather: every rank's consumer saw its part only
    gather_sequence           all-gather       "same": this rank's part, where all ranks compute the same from the whole
                                               "parts": reduce-scatter, where each rank computes a part from the whole
    reduce_scatter_sequence   reduce-scatter   all-gather

Each op's backward is another one of them, so they can be differentiated any number of times.

Sums over ranks are sums, in the tensors' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gtp.errors import GTPValueError
from gtp.ops.collective_backends import resolve_group
from gtp.ops.compilers import never_compiled, outside_graphs
from gtp.ops.sequence import from_rows, rows_of

GroupOrMesh = dist.ProcessGroup | DeviceMesh


@outside_graphs
def split_sequence(x: torch.Tensor, group: GroupOrMesh, *, sequence_dim: int = 0) -> torch.Tensor:
    """This rank's part of an activation that every rank has whole.

    Args:
        x: `[..., S, ..., features]`, the same on all ranks of the group; S a multiple of its size.
        group: The tensor-parallel group or a 1-d mesh.
        sequence_dim: Any dim of `x` but the last.

    Returns:
        `[..., S/R, ..., features]`.

    Raises:
        GTPValueError: the sequence does not split, or the dim is the last one.
    """
    rows, process_group = _rows(x, group, sequence_dim, "split_sequence", splits=True)
    part = x.shape[sequence_dim] // process_group.size()
    return from_rows(_split(rows, process_group), x, sequence_dim, part)


@outside_graphs
def gather_sequence(
    x: torch.Tensor, group: GroupOrMesh, *, sequence_dim: int = 0, consumers: Literal["same", "parts"]
) -> torch.Tensor:
    """The whole activation, from every rank's part of the sequence.

    Args:
        x: `[..., S/R, ..., features]`, equal shapes on all ranks.
        group: The tensor-parallel group or a 1-d mesh.
        sequence_dim: Any dim of `x` but the last.
        consumers: "same": every rank computes the same from the result (a head and loss on all tokens), so each has the
            whole gradient. "parts": each rank computes something else from it (its own experts, its own vocabulary), so
            gradients are added up over ranks. The wrong word gives gradients that are R times too large or small.

    Returns:
        `[..., S, ..., features]`.
    """
    if consumers not in ("same", "parts"):
        raise GTPValueError(f"gather_sequence: consumers must be 'same' or 'parts', got {consumers!r}")
    rows, process_group = _rows(x, group, sequence_dim, "gather_sequence", splits=False)
    whole = _gather(rows, process_group, consumers == "parts")
    return from_rows(whole, x, sequence_dim, x.shape[sequence_dim] * process_group.size())


@outside_graphs
def reduce_scatter_sequence(x: torch.Tensor, group: GroupOrMesh, *, sequence_dim: int = 0) -> torch.Tensor:
    """This rank's part of the sum over ranks. Shapes and errors as in `split_sequence`."""
    rows, process_group = _rows(x, group, sequence_dim, "reduce_scatter_sequence", splits=True)
    part = x.shape[sequence_dim] // process_group.size()
    return from_rows(_reduce_scatter(rows, process_group), x, sequence_dim, part)


def _rows(
    x: torch.Tensor, group: GroupOrMesh, sequence_dim: int, who: str, *, splits: bool
) -> tuple[torch.Tensor, dist.ProcessGroup]:
    process_group = resolve_group(group)
    rows = rows_of(x, sequence_dim, who)
    if splits and x.shape[sequence_dim] % process_group.size():
        raise GTPValueError(
            f"{who}: a sequence of {x.shape[sequence_dim]} (dim {sequence_dim} of x {tuple(x.shape)}) does not split "
            f"over {process_group.size()} ranks: pad it to a multiple"
        )
    return rows, process_group


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return part_of_rows(rows, group).clone()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group, False), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, parts: bool) -> torch.Tensor:
        ctx.group, ctx.parts = group, parts
        return all_gather_rows(rows, group)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mine = _reduce_scatter(grad, ctx.group) if ctx.parts else _split(grad, ctx.group)
        return mine, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_rows(rows, group)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group, True), None


_split = cast("Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]", _Split.apply)
_gather = cast("Callable[[torch.Tensor, dist.ProcessGroup, bool], torch.Tensor]", _Gather.apply)
_reduce_scatter = cast("Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]", _ReduceScatter.apply)


def part_of_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's block of rows, a view."""
    count = rows.shape[0] // group.size()
    return rows.narrow(0, group.rank() * count, count)


def all_gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's rows `[m, features]`, one after the other in rank order."""
    out = rows.new_empty(rows.shape[0] * group.size(), rows.shape[1])
    if out.numel():
        dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def reduce_scatter_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's block of the sum over ranks of `rows [R m, features]`."""
    out = rows.new_empty(rows.shape[0] // group.size(), rows.shape[1])
    if out.numel():
        dist.reduce_scatter_tensor(out, rows.contiguous(), op=dist.ReduceOp.SUM, group=group)
    return out

"""`GemmBackend`: how activations move between the ranks of a tensor-parallel group beside the GEMM that needs them.

Shapes are per rank. R is the group's size; the ranks' blocks of rows lie one after the other in rank order.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gtp.ops.collective_backends.agreement import Agreement


class Factor(NamedTuple):
    """The right-hand side of one product `gathered @ matrix + bias`.

    Attributes:
        matrix: `[K, N]`, any strides.
        bias: `[N]`, or None. Added before the product is rounded.
        out: `[M, N]`, any strides, where the product goes; None for fresh memory.
    """

    matrix: torch.Tensor
    bias: torch.Tensor | None = None
    out: torch.Tensor | None = None


class Gathering(abc.ABC):
    """An all-gather of rows, under way inside its own `with` block."""

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @abc.abstractmethod
    def matmul(self, factors: Sequence[Factor]) -> list[torch.Tensor]:
        """`gathered @ matrix + bias` per factor, `[M, N]`. At most once."""

    @abc.abstractmethod
    def full(self) -> torch.Tensor:
        """The gathered rows `[M, K]`, to be read inside the `with` block only, in the order of the current stream.

        Only of a gathering that was started with `whole=True`.
        """

    @abc.abstractmethod
    def columns(self) -> torch.Tensor:
        """This rank's columns of the gathered rows, `[M, K/R]`, in memory of their own, to be read after the block.

        Only of a gathering that was started with `columns=True`; inside the block, after `matmul`.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Nothing stays in flight, whether or not somebody read it."""


class GemmBackend(abc.ABC):
    """Moves activations of one tensor-parallel group. Modules of one model should share one: it owns the workspace.

    All methods are collective: every rank of the group calls the same ones in the same order, with equal shapes.

    Args:
        process_group: The tensor-parallel group. None for one rank without a group.
        debug: Compare every call with the other ranks' before it starts, through the job's store.
    """

    name: str
    """What `tp_gemm_backend` calls it."""

    takes_bias: bool = True
    """Whether `Factor.bias` is served."""

    gathers_under_matmul: bool
    """Whether `Gathering.matmul` hides the gather, so that it is the first thing to do with gathered rows."""

    def __init__(self, process_group: dist.ProcessGroup | None, *, debug: bool = False) -> None:
        self.process_group = process_group
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.size: int = 1 if process_group is None else process_group.size()
        self._agreement = None if process_group is None else Agreement(process_group, every_call=debug)

    @abc.abstractmethod
    def gather(self, rows: torch.Tensor, *, whole: bool = False, columns: bool = False, width: int = 0) -> Gathering:
        """A gathering of every rank's rows; entering its `with` block starts it.

        Args:
            rows: `[M/R, K]`, contiguous, or the transpose of something contiguous. Not written before the block ends.
            whole: Whether `Gathering.full` will be asked for; `rows` are contiguous then.
            columns: Whether `Gathering.columns` will be asked for; K is a multiple of R then, and `rows` contiguous.
            width: Columns of all products that will be asked for, if that comes first in the block; 0 where that is not
                known, or something else is waited for before.
        """

    @abc.abstractmethod
    def matmul_reduce_scatter(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """This rank's rows of the sum over ranks and products of `a @ b`, `[M/R, N]`.

        Args:
            products: Pairs `a [M, K_i]`, `b [K_i, N]`, any strides; M is a multiple of R.
        """

    def agree(self, operation: str, rows: int, columns: int, operand: torch.Tensor) -> None:
        """Raises on every rank if ranks are about to do different things. See `Agreement`."""
        if self._agreement is not None:
            self._agreement.check((operation, rows, columns, operand.dtype), operand.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GemmBackend:
        # a copied module talks over the same group; process groups and peer memory cannot be copied
        return self

    def __repr__(self) -> str:
        group = "no group" if self.process_group is None else f"group {self.process_group.group_name}"
        return f"{type(self).__name__}({group}, rank {self.rank} of {self.size})"

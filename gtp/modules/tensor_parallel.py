"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers split over tensor-parallel ranks, sequence parallel."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.modules._tensor_parallel import (
    TensorParallelModule,
    TPOptions,
    check_bias,
    chunk,
    describe,
    draw,
    draw_bias,
)
from gtp.ops import linear
from gtp.ops.collective_linear import all_gather_linear, linear_reduce_scatter


class _ParallelLinear(TensorParallelModule):
    """A linear layer whose weight, and with its rows the bias, is split along one dim. Drawn whole, then cut."""

    _split_dim: ClassVar[int]

    def __init__(self, in_features: int, out_features: int, bias: bool, **options: Unpack[TPOptions]) -> None:
        super().__init__(**options)
        self.in_features = in_features
        self.out_features = out_features
        rows, columns = self._shape_here()
        self.weight = self.new_parameter(rows, columns)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", self.new_parameter(rows) if bias else None)
        self.reset_parameters()

    def _shape_here(self) -> tuple[int, int]:
        """Of this rank's weight.

        Raises:
            GTPValueError: features that do not split.
        """
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the whole layer, in the order of `nn.Linear`, and keeps this rank's part."""
        shape = (self.out_features, self.in_features)
        self.weight.copy_(draw(self.weight, shape, self.init_method, chunk(self.backend, self._split_dim)))
        if self.bias is not None:
            part = chunk(self.backend, 0) if self._split_dim == 0 else lambda full: full
            self.bias.copy_(draw_bias(self.bias, self.out_features, self.in_features, part))

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["weight"]]

    def extra_repr(self) -> str:
        return describe(self.in_features, self.out_features, self.bias is not None, self.backend)


class ColumnParallelLinear(_ParallelLinear):
    """`y = x W^T + b` with the out features split: gathers the sequence, gives this rank's features.

    Parameters: `weight` `[out_features / R, in_features]`, `bias` `[out_features / R]`; R tensor-parallel ranks. Either
    may be swapped by `gtp.shard_model` over another axis.

    Args:
        in_features, out_features: Of the whole layer.
        bias: Whether there is one.
        options: `tp_group`, `tp_gemm_backend`, `sequence_parallel`, `sequence_dim`, `init_method`, `device`, `dtype`:
            see `TensorParallelModule`.

    Raises:
        GTPValueError: features that do not split, sequence parallelism off, a backend that cannot serve.
    """

    _split_dim = 0

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Unpack[TPOptions]) -> None:
        super().__init__(in_features, out_features, bias, **options)
        check_bias(type(self).__name__, bias, self.backend)

    def _shape_here(self) -> tuple[int, int]:
        self.part_of("in_features", self.in_features)  # backward gathers them in parts
        return self.part_of("out_features", self.out_features), self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: `[..., in_features]` with 1/R of the sequence.

        Returns:
            `[..., out_features / R]` with the whole sequence.
        """
        if self.backend.size == 1:
            return linear(x, self.weight, self.bias)
        return all_gather_linear(x, self.weight, self.bias, backend=self.backend, sequence_dim=self.dim_of(x))


class RowParallelLinear(_ParallelLinear):
    """`y = x W^T + b` with the in features split: sums over the ranks, gives this rank's part of the sequence.

    Parameters: `weight` `[out_features, in_features / R]`; `bias` `[out_features]`, the same on all ranks, with its
    whole gradient on each. Arguments and errors as in `ColumnParallelLinear`.
    """

    _split_dim = 1

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Unpack[TPOptions]) -> None:
        super().__init__(in_features, out_features, bias, **options)

    def _shape_here(self) -> tuple[int, int]:
        if self.out_features < 1:
            raise GTPValueError(f"{type(self).__name__}: out_features={self.out_features} must be at least 1")
        return self.out_features, self.part_of("in_features", self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: `[..., in_features / R]` with the whole sequence.

        Returns:
            `[..., out_features]` with 1/R of the sequence.
        """
        if self.backend.size == 1:
            return linear(x, self.weight, self.bias)
        return linear_reduce_scatter(x, self.weight, self.bias, backend=self.backend, sequence_dim=self.dim_of(x))

"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers split over tensor-parallel ranks, sequence parallel."""

from __future__ import annotations

import torch
from torch import nn

from gtp.modules._tensor_parallel import (
    GroupOrMesh,
    Init,
    check_bias,
    chunk,
    describe,
    draw,
    draw_bias,
    kaiming,
    part_of,
    sequence_dim_of,
    tp_backend,
)
from gtp.ops import linear
from gtp.ops.collective_backends import BackendName, GemmBackend
from gtp.ops.collective_linear import all_gather_linear, linear_reduce_scatter


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b` with the out features split: gathers the sequence, gives this rank's features.

    Parameters: `weight` `[out_features / R, in_features]`, `bias` `[out_features / R]`; R tensor-parallel ranks. Either
    may be swapped by `gtp.shard_model` over another axis.

    Args:
        in_features, out_features: Of the whole layer.
        bias: Whether there is one.
        tp_group: The tensor-parallel group or a 1-d mesh. None: one rank.
        tp_gemm_backend: How the gather and the GEMM go together, see `gtp.ops.gemm_backend`. Give all modules of a
        model
            one backend object where it owns a workspace. At one rank the stock linear runs, and a backend asked for by
            name is mentioned in a warning.
        sequence_parallel: Must be True with more than one rank.
        sequence_dim: Which dim of 3-d activations is the sequence: 1 for `[batch, sequence, features]`, 0 for
            `[sequence, batch, features]`, which moves less data. 2-d activations are `[tokens, features]`.
        init_method: Fills the whole weight `[out_features, in_features]` in place. Default: that of `nn.Linear`, so the
            same seed gives the same layer as `nn.Linear` at every R.
        device, dtype: Of the parameters.

    Raises:
        GTPValueError: features that do not split, sequence parallelism off, a backend that cannot serve.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tp_group: GroupOrMesh | None = None,
        tp_gemm_backend: BackendName | GemmBackend = "auto",
        sequence_parallel: bool = True,
        sequence_dim: int = 1,
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.backend = tp_backend(who, tp_group, tp_gemm_backend, sequence_parallel=sequence_parallel, device=device)
        part_of(who, "in_features", in_features, self.backend)  # backward gathers them in parts
        rows = part_of(who, "out_features", out_features, self.backend)
        check_bias(who, bias, self.backend)
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_dim = sequence_dim
        self.init_method = kaiming if init_method is None else init_method
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the whole layer, in the order of `nn.Linear`, and keeps this rank's rows."""
        part = chunk(self.backend, 0)
        self.weight.copy_(draw(self.weight, (self.out_features, self.in_features), self.init_method, part))
        if self.bias is not None:
            self.bias.copy_(draw_bias(self.bias, self.out_features, self.in_features, part))

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["weight"]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: `[..., in_features]` with 1/R of the sequence.

        Returns:
            `[..., out_features / R]` with the whole sequence.
        """
        if self.backend.size == 1:
            return linear(x, self.weight, self.bias)
        dim = sequence_dim_of(x, self.sequence_dim)
        return all_gather_linear(x, self.weight, self.bias, backend=self.backend, sequence_dim=dim)

    def extra_repr(self) -> str:
        return describe(self.in_features, self.out_features, self.bias is not None, self.backend)


class RowParallelLinear(nn.Module):
    """`y = x W^T + b` with the in features split: sums over the ranks, gives this rank's part of the sequence.

    Parameters: `weight` `[out_features, in_features / R]`; `bias` `[out_features]`, the same on all ranks, with its
    whole gradient on each. Arguments and errors as in `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tp_group: GroupOrMesh | None = None,
        tp_gemm_backend: BackendName | GemmBackend = "auto",
        sequence_parallel: bool = True,
        sequence_dim: int = 1,
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.backend = tp_backend(who, tp_group, tp_gemm_backend, sequence_parallel=sequence_parallel, device=device)
        columns = part_of(who, "in_features", in_features, self.backend)
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_dim = sequence_dim
        self.init_method = kaiming if init_method is None else init_method
        self.weight = nn.Parameter(torch.empty(out_features, columns, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        one = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", one)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the whole layer, in the order of `nn.Linear`, and keeps this rank's columns."""
        part = chunk(self.backend, 1)
        self.weight.copy_(draw(self.weight, (self.out_features, self.in_features), self.init_method, part))
        if self.bias is not None:
            self.bias.copy_(draw_bias(self.bias, self.out_features, self.in_features, lambda full: full))

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["weight"]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: `[..., in_features / R]` with the whole sequence.

        Returns:
            `[..., out_features]` with 1/R of the sequence.
        """
        if self.backend.size == 1:
            return linear(x, self.weight, self.bias)
        dim = sequence_dim_of(x, self.sequence_dim)
        return linear_reduce_scatter(x, self.weight, self.bias, backend=self.backend, sequence_dim=dim)

    def extra_repr(self) -> str:
        return describe(self.in_features, self.out_features, self.bias is not None, self.backend)

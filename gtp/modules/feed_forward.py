"""`FeedForward` and `FusedSwiGLU`: the SwiGLU block of a transformer, `w2(silu(w1 x) * (w3 x))`.

Both take the same arguments, have the same state dict, and run two collectives forward (one gather, one reduce-scatter)
and three backward. `FeedForward` has three weights. `FusedSwiGLU` has gate and up in one, for one GEMM in place of two.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Unpack

import torch
import torch.nn.functional as F

from gtp.modules._fused import FusedParameters, Part
from gtp.modules._tensor_parallel import TensorParallelModule, TPOptions, chunk, draw
from gtp.modules.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from gtp.ops.collective_linear import all_gather_linear, all_gather_linear_multi
from gtp.ops.swiglu import silu_and_mul, silu_and_mul_pairs
from gtp.protocol import is_distributed_weight


def swiglu_feed_forward(
    dim: int, hidden_dim: int, *, fused: bool, **options: Unpack[TPOptions]
) -> FeedForward | FusedSwiGLU:
    """`FusedSwiGLU` if `fused`, else `FeedForward`; both with the collective GEMMs that `tp_gemm_backend` asks for."""
    return (FusedSwiGLU if fused else FeedForward)(dim, hidden_dim, **options)


class FeedForward(TensorParallelModule):
    """SwiGLU with three weights; gate and up share one gather of the sequence.

    Children: `w1` (gate) and `w3` (up), `ColumnParallelLinear` without bias, of which only the weights are used here;
    `w2` (down), `RowParallelLinear` without bias.

    Args:
        dim: In and out features.
        hidden_dim: Features between; a multiple of the number of tensor-parallel ranks, like `dim`.
        options: As in `ColumnParallelLinear`.

    Raises:
        GTPValueError: features that do not split, sequence parallelism off, a backend that cannot serve.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        **options: Unpack[TPOptions],
    ) -> None:
        super().__init__(**options)
        self.part_of("dim", dim)
        self.part_of("hidden_dim", hidden_dim)
        inner = self.inner(options)
        # in this order, the same seed gives the same weights as FusedSwiGLU
        self.w1 = ColumnParallelLinear(dim, hidden_dim, bias=False, **inner)
        self.w3 = ColumnParallelLinear(dim, hidden_dim, bias=False, **inner)
        self.w2 = RowParallelLinear(hidden_dim, dim, bias=False, **inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and result: `[..., dim]` with 1/R of the sequence."""
        if self.backend.size == 1:
            gate, up = self.w1(x), self.w3(x)
        else:
            gate, up = all_gather_linear_multi(
                x,
                [self.w1.weight, self.w3.weight],
                backend=self.backend,
                sequence_dim=self.dim_of(x),
            )
        y: torch.Tensor = self.w2(silu_and_mul(gate, up))
        return y


class FusedSwiGLU(FusedParameters, TensorParallelModule):
    """SwiGLU with gate and up in one weight, so that they are one GEMM and one gather under tensor and weight sharding.

    Parameters: `w13` `[hidden_dim / R, 2, dim]`, gate at index 0 of dim 1, up at index 1. A split of dim 0 splits both
    alike, which is why they are interleaved. Child: `w2`, `RowParallelLinear` without bias.

    State dicts have `w1.weight` and `w3.weight` as `FeedForward`'s do, so checkpoints of either load into the other;
    the fused layout (`w13`) loads too. A `w13` that is distributed (`gtp.shard_model`, FSDP) is saved as it is, under
    `w13`.

    Arguments and errors as in `FeedForward`.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        **options: Unpack[TPOptions],
    ) -> None:
        super().__init__(**options)
        self.part_of("dim", dim)
        rows = self.part_of("hidden_dim", hidden_dim)
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.w13 = self.new_parameter(rows, 2, dim)
        self.reset_parameters()
        self.w2 = RowParallelLinear(hidden_dim, dim, bias=False, **self.inner(options))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the whole w1, then the whole w3, and keeps this rank's rows of both."""
        for part in self.fused_parts():
            shape = (self.hidden_dim, self.dim)
            part.view(self.w13).copy_(draw(self.w13, shape, self.init_method, chunk(self.backend, 0)))

    def fused_parts(self) -> list[Part]:
        """`w1` and `w3` in `w13`."""
        return [
            Part("w13", "w1.weight", lambda w13: w13[:, 0], leading_dims=1),
            Part("w13", "w3.weight", lambda w13: w13[:, 1], leading_dims=1),
        ]

    @property
    def w1(self) -> SimpleNamespace:
        """`weight`: the gate's, `[hidden_dim / R, dim]`, a view."""
        return self.saved_parts("w1")

    @property
    def w3(self) -> SimpleNamespace:
        """`weight`: the up projection's, `[hidden_dim / R, dim]`, a view."""
        return self.saved_parts("w3")

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["w13"]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and result: `[..., dim]` with 1/R of the sequence."""
        if self.backend.size == 1 and not is_distributed_weight(self.w13):
            y13 = F.linear(x, self.w13.flatten(0, 1))
        elif self.backend.size == 1:  # no sequence is split: leading dims are whatever they are
            y13 = all_gather_linear(x.reshape(x.shape[:-1].numel(), x.shape[-1]), self.w13, backend=self.backend)
            y13 = y13.view(*x.shape[:-1], y13.shape[1])
        else:
            y13 = all_gather_linear(x, self.w13, backend=self.backend, sequence_dim=self.dim_of(x))
        y: torch.Tensor = self.w2(silu_and_mul_pairs(y13.unflatten(-1, (-1, 2))))
        return y

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, hidden_dim={self.hidden_dim}, tp={self.backend.size}, tp_gemm_backend={self.backend.name}"
        )

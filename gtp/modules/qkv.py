"""`FusedQKVLinear`: the three projections of grouped-query attention as one GEMM, split by key-value head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Unpack

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.modules._fused import FusedParameters, Part
from gtp.modules._tensor_parallel import TensorParallelModule, TPOptions, check_bias, draw, draw_bias
from gtp.ops import linear
from gtp.ops.collective_linear import all_gather_linear


class FusedQKVLinear(FusedParameters, TensorParallelModule):
    """Queries, keys and values of one input, with one gather of the sequence and one GEMM.

    Heads are split over the R tensor-parallel ranks by key-value head, each with the G = num_heads / num_kv_heads query
    heads that share it, so that every rank attends on its own. In memory a key-value head's rows lie together:

        weight [num_kv_heads / R * (G + 2) * head_dim, hidden_size]:  per key-value head, its G query heads, its key,
                                                                       its value
        bias   [num_kv_heads / R * (G + 2) * head_dim], or None

    State dicts have `wq.weight`, `wk.weight`, `wv.weight` (and biases), in the order of heads, so plain checkpoints of
    three projections load; the fused layout (`weight`) loads too. A weight that is distributed (`gtp.shard_model`,
    FSDP) is saved as it is, under `weight`.

    Args:
        hidden_size: In features.
        num_heads: Query heads of the whole layer.
        num_kv_heads: Key-value heads of the whole layer; a multiple of R, and a divisor of `num_heads`. Default:
            `num_heads`.
        head_dim: Default: hidden_size / num_heads.
        bias: Whether there is one.
        options: As in `ColumnParallelLinear`. `init_method` fills each projection's whole weight, queries first, so the
            same seed gives the same layer as three `nn.Linear`s.

    Raises:
        GTPValueError: heads that do not split, sequence parallelism off, a backend that cannot serve.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        **options: Unpack[TPOptions],
    ) -> None:
        super().__init__(**options)
        who = type(self).__name__
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise GTPValueError(f"{who}: num_kv_heads={self.num_kv_heads} must divide num_heads={num_heads}")
        if head_dim is not None and head_dim < 1:
            raise GTPValueError(f"{who}: head_dim={head_dim} must be at least 1, or None for hidden_size / num_heads")
        if head_dim is None and hidden_size % num_heads:
            raise GTPValueError(
                f"{who}: hidden_size={hidden_size} does not split into {num_heads} heads: give head_dim"
            )
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.part_of("hidden_size", hidden_size)
        self.kv_heads_here = self.part_of("num_kv_heads", self.num_kv_heads)
        check_bias(who, bias, self.backend)
        self.group = num_heads // self.num_kv_heads
        rows = self.kv_heads_here * (self.group + 2) * self.head_dim
        self.weight = self.new_parameter(rows, hidden_size)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", self.new_parameter(rows) if bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws three whole projections, queries first, each as `nn.Linear` would, and keeps this rank's heads."""
        for part in self.fused_parts():
            heads = self.num_heads if part.saved.startswith("wq") else self.num_kv_heads
            features = heads * self.head_dim
            target = part.view(getattr(self, part.parameter))
            keep = self._heads_here
            if part.parameter == "weight":
                drawn = draw(self.weight, (features, self.hidden_size), self.init_method, keep)
            else:
                drawn = draw_bias(self.weight, features, self.hidden_size, keep)
            target.copy_(drawn.view(target.shape))

    def _heads_here(self, full: torch.Tensor) -> torch.Tensor:
        return full.chunk(self.backend.size, 0)[self.backend.rank]

    def fused_parts(self) -> list[Part]:
        """How `weight` and `bias` divide into the three projections' own. Drawn in this order."""
        group = self.group
        places = {"wq": slice(0, group), "wk": slice(group, group + 1), "wv": slice(group + 1, group + 2)}
        parameters = ["weight"] if self.bias is None else ["weight", "bias"]

        def part(name: str, parameter: str) -> Part:
            def view(fused: torch.Tensor) -> torch.Tensor:
                heads = fused.view(self.kv_heads_here, group + 2, self.head_dim, *fused.shape[1:])
                return heads[:, places[name]]

            return Part(parameter, f"{name}.{parameter}", view, leading_dims=3)

        return [part(name, parameter) for name in places for parameter in parameters]

    @property
    def wq(self) -> SimpleNamespace:
        """`weight` `[num_heads / R * head_dim, hidden_size]`, and `bias` where there is one: of the queries."""
        return self.saved_parts("wq")

    @property
    def wk(self) -> SimpleNamespace:
        """`weight` `[num_kv_heads / R * head_dim, hidden_size]`, and `bias` where there is one: of the keys."""
        return self.saved_parts("wk")

    @property
    def wv(self) -> SimpleNamespace:
        """`weight` `[num_kv_heads / R * head_dim, hidden_size]`, and `bias` where there is one: of the values."""
        return self.saved_parts("wv")

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["weight"]]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            x: `[..., hidden_size]` with 1/R of the sequence.

        Returns:
            Queries `[..., num_heads / R, head_dim]`, keys and values `[..., num_kv_heads / R, head_dim]`, with the
            whole sequence. Query heads of a key-value head are neighbours.
        """
        if self.backend.size == 1:
            y = linear(x, self.weight, self.bias)
        else:
            y = all_gather_linear(x, self.weight, self.bias, backend=self.backend, sequence_dim=self.dim_of(x))
        heads = y.unflatten(-1, (self.kv_heads_here, self.group + 2, self.head_dim))
        q, k, v = heads.split((self.group, 1, 1), dim=-2)
        return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, bias={self.bias is not None}, tp={self.backend.size}, "
            f"tp_gemm_backend={self.backend.name}"
        )

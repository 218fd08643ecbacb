"""`GroupedMLP`: the experts of a mixture, each two linears and an activation, over two groups of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gtp.modules._tensor_parallel import Init
from gtp.modules.grouped_linear import GroupedLinear
from gtp.ops.grouped_mlp import Activation, check_activation, grouped_mlp


class GroupedMLP(nn.Module):
    """`fc2_e(activation(fc1_e(x_e)))` for `num_experts` experts, on consecutive blocks of rows.

    Children: `fc1` and `fc2`, `GroupedLinear`s without bias, of which only the weights are used here: `fc1.weight{e}`
    `[2 hidden_dim, dim]` for "swiglu" (gate in the first rows), else `[hidden_dim, dim]`; `fc2.weight{e}`
    `[dim, hidden_dim]`. `gtp.shard_model` gathers each of the two as one group: fc2 under fc1's GEMMs.

    Args:
        num_experts: Experts on this rank.
        dim: In and out features.
        hidden_dim: Features between.
        activation: "swiglu", or a function from `[rows, hidden_dim]` to `[rows, hidden_dim]`.
        init_method: Fills a weight in place. Default: that of `GroupedLinear`.
        device, dtype: Of the parameters.

    Raises:
        GTPValueError: `num_experts` < 1, or an unknown activation.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "swiglu",
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_activation(activation)
        super().__init__()
        self.activation = activation
        rows = hidden_dim if callable(activation) else 2 * hidden_dim

        def experts(in_features: int, out_features: int) -> GroupedLinear:
            return GroupedLinear(
                num_experts, in_features, out_features, bias=False, init_method=init_method, params_dtype=dtype,
                device=device,
            )  # fmt: skip

        self.fc1, self.fc2 = experts(dim, rows), experts(hidden_dim, dim)

    def forward(self, x: torch.Tensor, m_splits: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: `[*, dim]`, the experts' rows one after the other. Rows beyond the splits are padding and give zeros.
            m_splits: Rows per expert.

        Returns:
            `[*, dim]`.
        """
        fc1, fc2 = ([getattr(m, f"weight{e}") for e in range(m.num_gemms)] for m in (self.fc1, self.fc2))
        return grouped_mlp(x, m_splits, fc1, fc2, activation=self.activation)

"""`GroupedLinear`: one linear per expert, on consecutive blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.modules._arguments import init_normal, refuse_arguments
from gtp.ops import grouped_linear


class GroupedLinear(nn.Module):
    """`y_e = x_e W_e^T + b_e` for `num_gemms` experts.

    Constructor names and defaults are those of `transformer_engine.pytorch.GroupedLinear`. Parameters are plain until
    `gtp.shard_model` swaps them: `weight0` to `weightN-1`, each `[out_features, in_features]`, which are gathered
    together; `bias0` to `biasN-1`, each `[out_features]`, or None.

    Args:
        num_gemms: Number of experts.
        in_features: Size of the input's last dim.
        out_features: Size of the output's last dim.
        init_method: Fills a weight in place. Default: normal, mean 0, standard deviation 0.023.
        bias: Whether there are biases; they start at zero.
        return_bias: Do not add the biases: return `(y, [bias0, ...])`, with None for the list where there are none.
        params_dtype: Dtype of the parameters. Default: `torch.get_default_dtype()`.
        device: Device of the parameters, "meta" included. Default: torch's current default device.
        arguments: Transformer Engine's other arguments, at their defaults only.

    Raises:
        GTPValueError: `num_gemms` < 1.
        TypeError: an unknown argument.
        UnsupportedError: an argument of Transformer Engine that this module does not support.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], object] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **arguments: object,
    ) -> None:
        refuse_arguments(type(self).__name__, arguments)
        if num_gemms < 1:
            raise GTPValueError(f"num_gemms must be at least 1, got {num_gemms}")
        super().__init__()
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.init_method = init_normal if init_method is None else init_method
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            one = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None
            self.register_parameter(f"bias{i}", one)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights with `init_method`, in order, and zeroes the biases."""
        for weight in self._weights():
            self.init_method(weight)
        for bias in self._biases() or []:
            bias.zero_()

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [[f"weight{i}" for i in range(self.num_gemms)]]

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int] | torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor] | None]:
        """
        Args:
            inp: `[*, in_features]`, the experts' rows one after the other.
            m_splits: Rows per expert. They may add up to fewer rows than `inp` has; the rest is padding.
            is_first_microbatch: Taken for compatibility. It steers caches of FP8 weights; there are none.

        Returns:
            `[*, out_features]`; with `return_bias` a pair.
        """
        if self.return_bias:
            return grouped_linear(inp, m_splits, self._weights()), self._biases()
        return grouped_linear(inp, m_splits, self._weights(), self._biases())

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}"
        )

    def _weights(self) -> list[torch.Tensor]:
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def _biases(self) -> list[torch.Tensor] | None:
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None

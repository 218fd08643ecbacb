"""`Linear`: y = x W^T + b over a weight that may be sharded later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gtp.modules._arguments import init_normal, refuse_arguments
from gtp.ops import linear


class Linear(nn.Module):
    """`y = x W^T + b`. Constructor names and defaults are those of `transformer_engine.pytorch.Linear`.

    Parameters are plain until `gtp.shard_model` swaps them: `weight` `[out_features, in_features]`, `bias`
    `[out_features]` or None.

    Args:
        in_features: Size of the input's last dim.
        out_features: Size of the output's last dim.
        init_method: Fills a weight in place. Default: normal, mean 0, standard deviation 0.023.
        bias: Whether there is a bias; it starts at zero.
        return_bias: Do not add the bias: return `(y, bias)`, with None for the bias where there is none.
        params_dtype: Dtype of the parameters. Default: `torch.get_default_dtype()`.
        device: Device of the parameters, "meta" included. Default: torch's current default device.
        arguments: Transformer Engine's other arguments, at their defaults only.

    Raises:
        TypeError: an unknown argument.
        UnsupportedError: an argument of Transformer Engine that this module does not support.
    """

    def __init__(
        self,
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
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.return_bias = return_bias
        self.init_method = init_normal if init_method is None else init_method
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias: nn.Parameter | None
        one = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None
        self.register_parameter("bias", one)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weight with `init_method` and zeroes the bias."""
        self.init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["weight"]]

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            inp: `[*, in_features]`.
            is_first_microbatch: Taken for compatibility. It steers caches of FP8 weights; there are none.

        Returns:
            `[*, out_features]`; with `return_bias` a pair.
        """
        if self.return_bias:
            return linear(inp, self.weight), self.bias
        return linear(inp, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

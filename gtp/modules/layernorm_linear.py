"""`LayerNormLinear`: LayerNorm or RMSNorm, then Linear, in one module that keeps one activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.modules._arguments import init_normal, refuse_arguments
from gtp.ops import layernorm_linear, linear, norm
from gtp.ops.layernorm_linear import Normalization


class LayerNormLinear(nn.Module):
    """`y = norm(x) W^T + b`. Constructor names and defaults are those of `transformer_engine.pytorch.LayerNormLinear`.

    Parameters, plain until `gtp.shard_model` swaps the weight: `layer_norm_weight` `[in_features]`, `layer_norm_bias`
    `[in_features]` (None with RMSNorm), `weight` `[out_features, in_features]`, `bias` `[out_features]` or None.
    What backward keeps: see `gtp.ops.layernorm_linear`.

    Args:
        in_features: Size of the input's last dim, over which it is normalized.
        out_features: Size of the output's last dim.
        eps: Added to the variance (LayerNorm) or the mean square (RMSNorm).
        init_method: Fills the weight in place. Default: normal, mean 0, standard deviation 0.023.
        bias: Whether the linear part has a bias; it starts at zero.
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: Do not add the bias: return it too.
        params_dtype: Dtype of the parameters. Default: `torch.get_default_dtype()`.
        return_layernorm_output: Return the norm's output too.
        zero_centered_gamma: The norm scales by `1 + layer_norm_weight`, which starts at zero.
        device: Device of the parameters, "meta" included. Default: torch's current default device.
        arguments: Transformer Engine's other arguments, at their defaults only.

    Raises:
        GTPValueError: `normalization` is unknown.
        TypeError: an unknown argument.
        UnsupportedError: an argument of Transformer Engine that this module does not support.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        init_method: Callable[[torch.Tensor], object] | None = None,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        **arguments: object,
    ) -> None:
        refuse_arguments(type(self).__name__, arguments)
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise GTPValueError(f"normalization must be 'LayerNorm' or 'RMSNorm', got {normalization!r}")
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.eps = eps
        self.normalization: Normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.init_method = init_normal if init_method is None else init_method

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=params_dtype, device=device))

        self.layer_norm_bias: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.layer_norm_weight = parameter(in_features)
        self.register_parameter("layer_norm_bias", parameter(in_features) if normalization == "LayerNorm" else None)
        self.weight = parameter(out_features, in_features)
        self.register_parameter("bias", parameter(out_features) if bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Makes the norm the identity up to scale 1, draws the weight with `init_method` and zeroes the biases."""
        self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            self.layer_norm_bias.zero_()
        self.init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def weight_groups(self) -> list[list[str]]:
        """Names of the parameters that may be sharded, in the groups that are gathered together."""
        return [["weight"]]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """
        Args:
            inp: `[*, in_features]`.
            is_first_microbatch: Taken for compatibility. It steers caches of FP8 weights; there are none.

        Returns:
            `y` `[*, out_features]`; or a tuple of `y`, the bias (with `return_bias`; None where there is none) and the
            norm's output `[*, in_features]` (with `return_layernorm_output`), in this order.
        """
        bias = None if self.return_bias else self.bias
        normed = None
        if self.return_layernorm_output:
            normed = norm(
                inp,
                self.layer_norm_weight,
                self.layer_norm_bias,
                normalization=self.normalization,
                eps=self.eps,
                zero_centered_gamma=self.zero_centered_gamma,
            )
            y = linear(normed, self.weight, bias)
        else:
            y = layernorm_linear(
                inp,
                self.layer_norm_weight,
                self.layer_norm_bias,
                self.weight,
                bias,
                normalization=self.normalization,
                eps=self.eps,
                zero_centered_gamma=self.zero_centered_gamma,
            )
        extra = ([self.bias] if self.return_bias else []) + ([normed] if self.return_layernorm_output else [])
        return (y, *extra) if extra else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"normalization={self.normalization}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
        )

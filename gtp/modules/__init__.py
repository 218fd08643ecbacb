"""Modules over `gtp.ops`. They know the protocol alone: the same module runs on plain weights, fakes and shards."""

from gtp.modules.grouped_linear import GroupedLinear
from gtp.modules.layernorm_linear import LayerNormLinear
from gtp.modules.linear import Linear

__all__ = [
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
]

"""Modules over `gtp.ops`. They know the protocol alone: the same module runs on plain weights, fakes and shards."""

from gtp.modules._tensor_parallel import sum_gradients_over_tp
from gtp.modules.feed_forward import FeedForward, FusedSwiGLU, swiglu_feed_forward
from gtp.modules.grouped_linear import GroupedLinear
from gtp.modules.grouped_mlp import GroupedMLP
from gtp.modules.layernorm_linear import LayerNormLinear
from gtp.modules.linear import Linear
from gtp.modules.qkv import FusedQKVLinear
from gtp.modules.tensor_parallel import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "FeedForward",
    "FusedQKVLinear",
    "FusedSwiGLU",
    "GroupedLinear",
    "GroupedMLP",
    "LayerNormLinear",
    "Linear",
    "RowParallelLinear",
    "sum_gradients_over_tp",
    "swiglu_feed_forward",
]

"""Autograd functions over weights that may be sharded. Of a shard they know the protocol (`gtp.protocol`) alone."""

from gtp.ops.embedding import embedding
from gtp.ops.grouped_linear import grouped_linear
from gtp.ops.layernorm_linear import layernorm_linear, norm
from gtp.ops.linear import linear

__all__ = [
    "embedding",
    "grouped_linear",
    "layernorm_linear",
    "linear",
    "norm",
]

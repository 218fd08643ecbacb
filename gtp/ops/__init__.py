"""Autograd functions over weights that may be sharded. Of a shard they know the protocol (`gtp.protocol`) alone."""

from gtp.ops.embedding import embedding
from gtp.ops.linear import linear

__all__ = [
    "embedding",
    "linear",
]

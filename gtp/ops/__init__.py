"""Autograd functions over weights that may be sharded. Of a shard they know the protocol (`gtp.protocol`) alone."""

from gtp.ops._common import is_wanted, refuse_double_backward
from gtp.ops.collective_backends import GemmBackend, gemm_backend
from gtp.ops.collective_linear import (
    AllGatherLinear,
    AllGatherLinearMulti,
    LinearReduceScatter,
    all_gather_linear,
    all_gather_linear_multi,
    linear_reduce_scatter,
)
from gtp.ops.embedding import embedding
from gtp.ops.grouped_linear import grouped_linear
from gtp.ops.grouped_mlp import grouped_mlp
from gtp.ops.layernorm_linear import layernorm_linear, norm
from gtp.ops.linear import linear
from gtp.ops.sequence_parallel import gather_sequence, reduce_scatter_sequence, split_sequence
from gtp.ops.swiglu import silu_and_mul, silu_and_mul_halves, silu_and_mul_pairs
from gtp.ops.whole import WholeWeights

__all__ = [
    "AllGatherLinear",
    "AllGatherLinearMulti",
    "GemmBackend",
    "LinearReduceScatter",
    "WholeWeights",
    "all_gather_linear",
    "all_gather_linear_multi",
    "embedding",
    "gather_sequence",
    "gemm_backend",
    "grouped_linear",
    "grouped_mlp",
    "is_wanted",
    "layernorm_linear",
    "linear",
    "linear_reduce_scatter",
    "norm",
    "reduce_scatter_sequence",
    "refuse_double_backward",
    "silu_and_mul",
    "silu_and_mul_halves",
    "silu_and_mul_pairs",
    "split_sequence",
]

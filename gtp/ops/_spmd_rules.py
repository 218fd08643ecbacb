"""How the collective GEMMs change SPMD types, for the checker of the package `spmd_types`.

The checker finds a rule on an autograd Function by its name, `spmd_typecheck`, and calls it; nothing here runs, and
nothing is imported, unless it does. Over the tensor-parallel axis, with global types:

    AllGatherLinear        x S(0), weight S(0), bias S(0)  ->  y S(1)
    LinearReduceScatter    x S(1), weight S(1), bias I     ->  y S(0)

With local types every S is V: that values vary over the axis, and not along which dim.

The bias of LinearReduceScatter is Invariant and not Replicate: its gradient comes whole on every rank, with nothing
left to be summed.
"""

from __future__ import annotations

import importlib
from typing import Any

from gtp.ops.collective_backends import GemmBackend


def gather_rule(*, x_shard_m: Any, weight: Any, bias: Any, backend: GemmBackend) -> Any:
    """The type of `AllGatherLinear`'s output."""
    return _gathered(x_shard_m, [weight], [bias], backend)[0]


def gather_multi_rule(*, backend: GemmBackend, x_shard_m: Any, weights_then_biases: Any) -> Any:
    """The types of `AllGatherLinearMulti`'s outputs."""
    count = len(weights_then_biases) // 2
    return tuple(_gathered(x_shard_m, weights_then_biases[:count], weights_then_biases[count:], backend))


def scatter_rule(*, x_shard_k: Any, weight: Any, bias: Any, backend: GemmBackend) -> Any:
    """The type of `LinearReduceScatter`'s output."""
    spmd = _spmd_types()
    axis = backend.process_group
    y = _product(spmd, x_shard_k, weight)
    if axis is not None:
        # local types do not know a contracted dim from another: a varying value is what is summed
        local = spmd.get_partition_spec(y) is None and spmd.get_axis_local_type(y, axis) == spmd.V
        y = spmd.rules.reduce_scatter(y, axis, src=spmd.V if local else spmd.P, dst=spmd.S(0))
    if bias is None:
        return y
    if axis is not None:
        bias = spmd.rules.convert(bias, axis, src=spmd.I, dst=spmd.R)
    return spmd.rules.einsum("mn,n->mn", y, bias)


def _gathered(x: Any, weights: Any, biases: Any, backend: GemmBackend) -> list[Any]:
    spmd = _spmd_types()
    if backend.process_group is not None:
        x = spmd.rules.all_gather(x, backend.process_group, src=spmd.S(0), dst=spmd.R)
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        y = _product(spmd, x, weight)
        outputs.append(y if bias is None else spmd.rules.einsum("mn,n->mn", y, bias))
    return outputs


def _product(spmd: Any, x: Any, weight: Any) -> Any:
    if weight.ndim == 2:
        return spmd.rules.einsum("mk,nk->mn", x, weight)
    # [hidden, 2, in]: the out features are the first two dims, flattened; only the outer one may be sharded
    return spmd.rules.einsum("mk,nk->mn", x, spmd.rules.einsum("n_k->nk", weight))


def _spmd_types() -> Any:
    # it does not say which names it exports
    return importlib.import_module("spmd_types")

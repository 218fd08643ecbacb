"""The collective GEMMs under the type checker of `spmd_types`, over gloo ranks: what it infers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from gtp.ops import all_gather_linear, all_gather_linear_multi, gemm_backend, linear_reduce_scatter

pytest.importorskip("spmd_types", reason="the package spmd-types is not installed")


def typed(shape: tuple[int, ...], group: Any, kind: Any) -> torch.Tensor:
    """A leaf of that type: made where nothing is inferred yet."""
    import spmd_types as spmd

    with spmd.no_typecheck():
        leaf = torch.ones(shape, requires_grad=True)
    spmd.assert_type(leaf, {group: kind})
    return leaf


def with_global_types() -> None:
    import spmd_types as spmd
    import spmd_types.checker
    from spmd_types import S

    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    group = mesh.get_group()
    backend = gemm_backend("collective", group)
    with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck(local=False):
        x = typed((3, 8), group, S(0))
        w1, w3, b = typed((5, 8), group, S(0)), typed((5, 8), group, S(0)), typed((5,), group, S(0))
        y = all_gather_linear(x, w1, b, backend=backend)
        spmd.assert_type(y, {group: S(1)})
        for one in all_gather_linear_multi(x, [w1, w3], backend=backend):
            spmd.assert_type(one, {group: S(1)})
        w13 = typed((5, 2, 8), group, S(0))
        spmd.assert_type(all_gather_linear(x, w13, backend=backend), {group: S(1)})
        w2, b2 = typed((8, 5), group, S(1)), typed((8,), group, spmd.I)
        z = linear_reduce_scatter(y, w2, b2, backend=backend)
        spmd.assert_type(z, {group: S(0)})
        assert z.shape == (3, 8)
        replicated, wrong_dim, summed = (
            typed((3, 8), group, spmd.R),
            typed((8, 5), group, S(0)),
            typed((8,), group, spmd.R),
        )
        with pytest.raises(spmd.SpmdTypeError):  # gathering the same rows would repeat them
            all_gather_linear(replicated, w1, backend=backend)
        with pytest.raises(spmd.SpmdTypeError):
            linear_reduce_scatter(y, wrong_dim, backend=backend)
        with pytest.raises(spmd.SpmdTypeError):  # it promises a gradient that is still to be summed; ours is whole
            linear_reduce_scatter(y, w2, summed, backend=backend)


def with_local_types() -> None:
    """Activations of three dims, too."""
    import spmd_types as spmd
    import spmd_types.checker

    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    group = mesh.get_group()
    backend = gemm_backend("collective", group)
    with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck(local=True):
        x, w1, w2 = (typed(shape, group, spmd.V) for shape in ((3, 4, 8), (5, 8), (8, 5)))
        y = all_gather_linear(x, w1, backend=backend)
        z = linear_reduce_scatter(y, w2, typed((8,), group, spmd.I), backend=backend)
        assert spmd.get_axis_local_type(y, group) == spmd.get_axis_local_type(z, group) == spmd.V
        assert z.shape == x.shape
        replicated = typed((3, 4, 8), group, spmd.R)
        with pytest.raises(spmd.SpmdTypeError):
            all_gather_linear(replicated, w1, backend=backend)


@pytest.mark.parametrize("check", [with_global_types, with_local_types])
def test_types_over_the_tensor_parallel_axis(ranks, check):
    ranks(2).run(check)

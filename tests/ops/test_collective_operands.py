"""What the collective GEMMs take and refuse: shapes, dtypes, devices. Errors come before any collective."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gtp.errors import GTPValueError, UnsupportedError
from gtp.ops import all_gather_linear, all_gather_linear_multi, gemm_backend, linear_reduce_scatter
from gtp.ops.collective_backends import GemmBackend, SingleRankBackend

Call = Callable[[GemmBackend], object]


def ones(*shape: int, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


@pytest.mark.parametrize("call, message", [
    (lambda b: all_gather_linear(ones(4, 8), ones(3, 6), backend=b), "shard (3, 6)) must be [..., 8] to meet x (4, 8)"),
    (lambda b: all_gather_linear(ones(4, 8), ones(8), backend=b), "shard (8,)) must be [..., 8] to meet x (4, 8)"),
    (lambda b: all_gather_linear(ones(4, 8), ones(3, 8), ones(4), backend=b), "the bias must be [3], got (4,)"),
    (lambda b: all_gather_linear(ones(4, 8), ones(3, 8), ones(1), backend=b), "the bias must be [3], got (1,)"),
    (lambda b: linear_reduce_scatter(ones(4, 8), ones(3, 8).bfloat16(), backend=b),
     "its full weight is torch.bfloat16 and the input is torch.float32"),
    (lambda b: all_gather_linear(ones(4, 8), ones(3, 8), ones(3).bfloat16(), backend=b),
     "all_gather_linear: the bias is torch.bfloat16 and x is torch.float32. Convert the bias"),
    (lambda b: linear_reduce_scatter(ones(4, 8), ones(3, 8), ones(3).double(), backend=b),
     "linear_reduce_scatter: the bias is torch.float64 and x is torch.float32. Convert the bias"),
    (lambda b: all_gather_linear_multi(ones(4, 8), [ones(3, 8), ones(3, 8)], [None, ones(3).half()], backend=b),
     "the bias is torch.float16"),
    (lambda b: all_gather_linear(ones(4, 8), ones(3, 8, device="meta"), backend=b),
     "the weight is on meta and x on cpu. Move one to the other"),
    (lambda b: linear_reduce_scatter(ones(4, 8, device="meta"), ones(3, 8), backend=b),
     "the weight is on cpu and x on meta"),
    (lambda b: linear_reduce_scatter(ones(4, 8), ones(3, 8), ones(3, device="meta"), backend=b),
     "the bias is on meta and x on cpu"),
    (lambda b: all_gather_linear_multi(ones(4, 8), [], backend=b), "weights must not be empty"),
    (lambda b: all_gather_linear_multi(ones(4, 8), [ones(2, 8)], [None, None], backend=b),
     "got 2 biases for 1 weights"),
    (lambda b: all_gather_linear(ones(8), ones(2, 8), backend=b), "at least a sequence and a feature dim"),
    (lambda b: all_gather_linear(ones(), ones(2, 8), backend=b), "at least a sequence and a feature dim, got a scalar"),
    (lambda b: linear_reduce_scatter(ones(), ones(2, 8), backend=b), "got a scalar"),
    (lambda b: all_gather_linear(ones(2, 8), ones(2, 8), backend=b, sequence_dim=3), "sequence_dim 3 does not exist"),
    (lambda b: all_gather_linear(ones(2, 8), ones(2, 8), backend="collective"),
     "backend must be a GemmBackend, got 'collective'. Make one for the tensor-parallel group with "
     "gtp.ops.gemm_backend(name, group)"),
    (lambda b: linear_reduce_scatter(ones(2, 8), ones(2, 8), backend=None), "backend must be a GemmBackend, got None"),
])  # fmt: skip
def test_wrong_operands(call: Call, message: str):
    with pytest.raises(GTPValueError) as error:
        call(SingleRankBackend())
    assert message in str(error.value)


@pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
def test_transforms_of_torch_func_are_refused(op):
    weight, backend = ones(3, 8), SingleRankBackend()
    with pytest.raises(UnsupportedError, match=rf"{op.__name__} was called inside a transform of torch.func.*autograd"):
        torch.func.grad(lambda w: op(ones(4, 8), w, backend=backend).sum())(weight)
    with pytest.raises(UnsupportedError, match=r"a batch dimension in place of vmap"):
        torch.func.vmap(lambda x: op(x, weight, backend=backend))(ones(2, 4, 8))


def no_features() -> None:
    """Out features, or in features and then the bias alone; 3-d with the batch first, so that rows are flattened."""
    backend = gemm_backend("collective", dist.group.WORLD)
    for op, rows, rows_out in ((all_gather_linear, 4, 8), (linear_reduce_scatter, 8, 4)):
        x, w, b = ones(2, rows, 0).requires_grad_(), ones(3, 0).requires_grad_(), torch.arange(3.0).requires_grad_()
        y = op(x, w, b, backend=backend, sequence_dim=1)
        y.sum().backward()
        assert torch.equal(y, b.expand(2, rows_out, 3))
        assert torch.equal(b.grad, torch.full((3,), 16.0))
        assert x.grad.shape == x.shape
        assert w.grad.shape == w.shape
        x, w = ones(2, rows, 6).requires_grad_(), ones(0, 6).requires_grad_()
        y = op(x, w, backend=backend, sequence_dim=1)
        y.sum().backward()
        assert y.shape == (2, rows_out, 0)
        assert torch.equal(x.grad, torch.zeros(2, rows, 6))


def test_layers_without_features(ranks):
    """As torch's own linear: no in features give the bias, no out features an empty output and zero gradients."""
    ranks(2).run(no_features)

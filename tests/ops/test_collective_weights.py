"""Collective GEMMs over distributed weights, by fakes that make a wrong route a wrong number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from gtp.errors import GTPStateError, GTPValueError, ProtocolError, UnsupportedError
from gtp.ops import all_gather_linear, all_gather_linear_multi, gemm_backend, linear_reduce_scatter
from gtp.ops.collective_backends import SingleRankBackend
from gtp.testing.fakes import VIOLATIONS, FakeDistributedWeight, Violation, violating_weight

FORWARD, BACKWARD, BUFFER, FINALIZE = (
    "materialize_group_for_forward",
    "materialize_group_for_backward",
    "grad_buffer",
    "finalize_group_grads",
)


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def part(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def routes(op: str, mode: str, trainable: bool, input_grad: bool, use_checkpoint: bool) -> list[str]:
    """Full weights are twice the weight in forward, three times in backward; gradients come back times five."""
    backend = gemm_backend("collective", dist.group.WORLD)
    gathers = op == "gather"
    x, w, dy = integers(8, 6, seed=0), integers(10, 6, seed=1), integers(8, 10, seed=2)
    x_here = part(x, 0 if gathers else 1).requires_grad_(input_grad)
    w_here = part(w, 0 if gathers else 1)
    weight = FakeDistributedWeight(w_here, mode=mode, rows=(0, 3), requires_grad=trainable)
    call = all_gather_linear if gathers else linear_reduce_scatter

    def run(x: torch.Tensor) -> torch.Tensor:
        return call(x, weight, backend=backend)

    y = checkpoint(run, x_here, use_reentrant=False) if use_checkpoint else run(x_here)
    assert torch.equal(y, part(x @ (2 * w).t(), 1 if gathers else 0))
    if not y.requires_grad:
        return weight.methods
    assert weight.live_full_weights == 0
    y.backward(part(dy, 1 if gathers else 0))
    if input_grad:
        assert torch.equal(x_here.grad, part(dy @ (3 * w), 0 if gathers else 1))
    if trainable:
        dw = 5 * part(dy.t() @ x, 0 if gathers else 1)[0:3]
        got = weight.main_grad if mode == "main_grad" else weight.grad
        assert torch.equal(got, dw)
    return weight.methods


@pytest.mark.parametrize("mode", ["ready", "deferred", "main_grad"])
@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_outcomes_and_wgrad_first(ranks, op, mode):
    for methods in ranks(2).run(routes, op, mode, True, True, False):
        assert methods == [FORWARD, BUFFER, FINALIZE, BACKWARD]


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_nothing_is_asked_that_nobody_needs(ranks, op):
    assert ranks(2).run(routes, op, "ready", False, True, False)[0] == [FORWARD, BACKWARD]
    assert ranks(2).run(routes, op, "ready", True, False, False)[0] == [FORWARD, BUFFER, FINALIZE]
    assert ranks(2).run(routes, op, "ready", False, False, False)[0] == [FORWARD]


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_under_checkpointing(ranks, op):
    """What checkpointing saves and gives back is a detached copy; the weight must still be asked."""
    methods = ranks(2).run(routes, op, "deferred", True, True, True)[0]
    assert methods == [FORWARD, FORWARD, BUFFER, FINALIZE, BACKWARD]


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("op", [
    lambda x, w: all_gather_linear(x, w, backend=SingleRankBackend()),
    lambda x, w: all_gather_linear_multi(x, [w, w], backend=SingleRankBackend())[1],
    lambda x, w: linear_reduce_scatter(x, w, backend=SingleRankBackend()),
], ids=["gather", "multi", "scatter"])  # fmt: skip
def test_c54_second_derivatives_are_refused(op, distributed):
    """C54. Of a sum, too, whose incoming gradient is a constant: a penalty's part was missing without a word."""
    full = integers(4, 6, seed=1)
    weight = FakeDistributedWeight(full, label="up.weight") if distributed else torch.nn.Parameter(full)
    x = integers(2, 6, seed=0).requires_grad_()
    y = op(x, weight).sum()
    with pytest.raises(UnsupportedError, match=r"double backward \(create_graph=True\).*gtp.ops.gather_sequence"):
        torch.autograd.grad(y, x, create_graph=True)
    if distributed:
        assert set(weight.methods) == {FORWARD}


def test_a_shard_written_between_forward_and_backward():
    weight = FakeDistributedWeight(integers(4, 6, seed=1))
    x = integers(2, 6, seed=0).requires_grad_()
    y = all_gather_linear(x, weight, backend=SingleRankBackend())
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(GTPStateError, match="changed in place between its forward and this backward"):
        y.sum().backward()


def test_a_weight_of_three_dims_and_buffers_of_another_dtype():
    """`[hidden, 2, in]`, as the fused SwiGLU's; and an implementer that wants fp32 wgrads of a bf16 GEMM."""
    w = integers(4, 2, 6, seed=1).bfloat16()
    weight = FakeDistributedWeight(w, buffer_dtype=torch.float32, mode="main_grad")
    x = integers(3, 6, seed=0).bfloat16().requires_grad_()
    y = all_gather_linear(x, weight, backend=SingleRankBackend())
    dy = integers(3, 8, seed=2).bfloat16()
    y.backward(dy)
    assert torch.equal(y, x @ (2 * w).flatten(0, 1).t())
    assert torch.equal(x.grad, dy @ (3 * w).flatten(0, 1))
    assert torch.equal(weight.main_grad, 5 * (dy.float().t() @ x.detach().float()).view(4, 2, 6))


def test_plain_main_grad_is_honoured():
    weight = integers(4, 6, seed=1).bfloat16().requires_grad_()
    weight.main_grad = torch.ones(4, 6)
    weight.grad_added_to_main_grad = False
    x, dy = integers(3, 6, seed=0).bfloat16(), integers(3, 4, seed=2).bfloat16()
    for op in (all_gather_linear, linear_reduce_scatter):
        weight.main_grad.fill_(1.0)
        op(x, weight, backend=SingleRankBackend()).backward(dy)
        assert weight.grad_added_to_main_grad
        assert torch.equal(weight.main_grad, 1 + dy.float().t() @ x.float())


def test_mixed_weights_of_one_gather():
    """Each weight leads a group of its own, plain ones among them."""
    fake, plain = FakeDistributedWeight(integers(4, 6, seed=1)), integers(5, 6, seed=2).requires_grad_()
    x = integers(3, 6, seed=0).requires_grad_()
    one, two = all_gather_linear_multi(x, [fake, plain], backend=SingleRankBackend())
    (one.sum() + two.sum()).backward()
    full = fake.fake.full
    assert torch.equal(x.grad, (3 * full.sum(0) + plain.detach().sum(0)).expand(3, 6))
    assert torch.equal(fake.grad, 5 * x.detach().sum(0).expand(4, 6))
    assert torch.equal(plain.grad, x.detach().sum(0).expand(5, 6))


def test_dtype_of_the_full_weight_must_be_the_inputs():
    weight = FakeDistributedWeight(integers(4, 6, seed=1).bfloat16())
    with pytest.raises(GTPValueError, match=r"its full weight is torch\.bfloat16 and the input is torch\.float32"):
        all_gather_linear(torch.ones(2, 6), weight, backend=SingleRankBackend())
    with torch.autocast("cpu", torch.bfloat16):
        y = all_gather_linear(torch.ones(2, 6), weight, backend=SingleRankBackend())
    assert torch.equal(y, (2 * weight.fake.full).sum(1).expand(2, 4))


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda v: f"{v.method}-{v.kind}")
@pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
def test_violations_are_named(op, violation: Violation):
    weight = violating_weight(integers(4, 6, seed=1), violation, mode="ready", label="layer.weight")
    x = integers(3, 6, seed=0).requires_grad_()
    with pytest.raises(ProtocolError, match=r"layer\.weight"):
        op(x, weight, backend=SingleRankBackend()).sum().backward()

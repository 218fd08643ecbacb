"""`silu_and_mul` against `F.silu(gate) * up`: torch here, the Triton kernel in its interpreter and on the GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from gtp.errors import GTPValueError
from gtp.ops import silu_and_mul, silu_and_mul_halves, silu_and_mul_pairs
from tests.processes import Ended


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_the_stock_expression_bit_for_bit(dtype):
    grads = []
    for call in (silu_and_mul, lambda g, u: F.silu(g) * u):
        gate, up = leaf(3, 5, 7, seed=0, dtype=dtype), leaf(3, 5, 7, seed=1, dtype=dtype)
        y = call(gate, up)
        y.backward(leaf(3, 5, 7, seed=2, dtype=dtype).detach())
        grads.append((y.detach(), gate.grad, up.grad))
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def errors_in_bf16(call) -> list[float]:
    """Largest error of output and gradients, in bf16 unit roundoffs of the fp64 value."""
    gate, up, dy = (leaf(64, 32, seed=s, dtype=torch.bfloat16) for s in range(3))
    y = call(gate, up)
    y.backward(dy.detach())
    g, u = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    want = F.silu(g) * u
    want.backward(dy.detach().double())
    pairs = ((y, want), (gate.grad, g.grad), (up.grad, u.grad))
    return [float(((a.double() - b).abs() / b.abs()).max().detach()) * 2**8 for a, b in pairs]


def test_bf16_is_rounded_once():
    """One roundoff is half a unit in the last place: at most 1 roundoff of the result, and what fp32 adds. The stock
    expression, which rounds silu(gate) and then the product, exceeds that."""
    assert max(errors_in_bf16(silu_and_mul)) < 1.001
    assert max(errors_in_bf16(lambda g, u: F.silu(g) * u)) > 1.2


def test_strided_inputs():
    packed = leaf(6, 16, seed=3)
    pairs = leaf(6, 8, 2, seed=3)
    expanded = leaf(1, 8, seed=4)
    for gate, up in (
        (packed[:, :8], packed[:, 8:]),
        (packed[:, ::2], packed[:, 1::2]),
        (pairs[..., 0], pairs[..., 1]),
        (expanded.expand(6, 8), packed[:, :8]),
        (leaf(8, 6, seed=5).t(), leaf(8, 6, seed=6).t()),
    ):
        got = silu_and_mul(gate, up)
        assert got.is_contiguous()
        assert torch.equal(got, F.silu(gate) * up)


def test_pairs_are_gate_and_up_interleaved():
    pairs, dy = leaf(4, 3, 8, 2, seed=0), leaf(4, 3, 8, seed=1).detach()
    y = silu_and_mul_pairs(pairs)
    y.backward(dy)
    plain = pairs.detach().clone().requires_grad_()
    want = F.silu(plain[..., 0]) * plain[..., 1]
    want.backward(dy)
    assert torch.equal(y, want)
    assert torch.equal(pairs.grad, plain.grad)
    assert pairs.grad.is_contiguous()


def test_halves_are_gate_then_up():
    packed, dy = leaf(4, 3, 16, seed=0), leaf(4, 3, 8, seed=1).detach()
    y = silu_and_mul_halves(packed)
    y.backward(dy)
    plain = packed.detach().clone().requires_grad_()
    gate, up = plain.chunk(2, -1)
    want = F.silu(gate) * up
    want.backward(dy)
    assert torch.equal(y, want)
    assert torch.equal(packed.grad, plain.grad)


@pytest.mark.parametrize("call, shape", [
    (silu_and_mul_pairs, (4, 8, 2)), (silu_and_mul_halves, (4, 16)),
    (lambda t: silu_and_mul(*t.chunk(2, -1)), (4, 16)),
])  # fmt: skip
def test_compiled_gradients_are_eager_ones(call, shape):
    """Traced, gradients written into views came out as zeros."""
    torch._dynamo.reset()
    grads = []
    for run in (call, torch.compile(call, backend="aot_eager")):
        t = leaf(*shape, seed=0)
        run(t * 2).square().sum().backward()
        grads.append(t.grad)
    assert torch.equal(*grads)
    assert grads[0].abs().max() > 0


def test_gradient_of_a_sum_is_expanded():
    gate, up = leaf(4, 8, seed=0), leaf(4, 8, seed=1)
    silu_and_mul(gate, up).sum().backward()
    plain = gate.detach().clone().requires_grad_()
    (F.silu(plain) * up.detach()).sum().backward()
    assert torch.equal(gate.grad, plain.grad)


@pytest.mark.parametrize("num_rows", [0, 4, 6, 9, torch.tensor(4), torch.tensor([4], dtype=torch.int32)])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_c82_rows_beyond_the_limit_have_no_effect(num_rows, junk):
    """They give zeros and get zeros, whatever they and their gradients hold."""
    kept = min(int(num_rows), 6)
    gate, up, dy = leaf(2, 3, 8, seed=0), leaf(2, 3, 8, seed=1), leaf(2, 3, 8, seed=2)
    with torch.no_grad():
        for t in (gate, up, dy):
            t.view(6, 8)[kept:] = junk
    y = silu_and_mul(gate, up, num_rows=num_rows)
    y.backward(dy.detach())
    rows = [t.detach().view(6, 8)[:kept].clone().requires_grad_() for t in (gate, up, dy)]
    want = F.silu(rows[0]) * rows[1]
    want.backward(rows[2].detach())
    for got, expected in ((y, want), (gate.grad, rows[0].grad), (up.grad, rows[1].grad)):
        got = got.detach().view(6, 8)
        assert torch.equal(got[:kept], expected.detach())
        assert torch.equal(got[kept:], torch.zeros(6 - kept, 8))


@pytest.mark.parametrize("rows, features", [(0, 8), (4, 0), (0, 0)])
def test_empty(rows, features):
    gate, up = leaf(rows, features, seed=0), leaf(rows, features, seed=1)
    for y in (
        silu_and_mul(gate, up, num_rows=2),
        silu_and_mul_pairs(torch.stack((gate, up), -1), num_rows=2),
        silu_and_mul_halves(torch.cat((gate, up), -1), num_rows=2),
    ):
        y.sum().backward()
        assert y.shape == (rows, features)
        assert gate.grad.shape == (rows, features)


FORMS = {
    "two": lambda g, u, n=None: silu_and_mul(g, u, num_rows=n),
    "pairs": lambda g, u, n=None: silu_and_mul_pairs(torch.stack((g, u), -1), num_rows=n),
    "halves": lambda g, u, n=None: silu_and_mul_halves(torch.cat((g, u), -1), num_rows=n),
}


@pytest.mark.parametrize("form", FORMS)
def test_c54_gradient_penalty(form):
    """C54. Of a sum, whose incoming gradient is a constant: the penalty's part was missing without a word."""
    grads = []
    for call in (FORMS[form], lambda g, u: F.silu(g) * u):
        gate, up = leaf(3, 4, seed=0, dtype=torch.float64), leaf(3, 4, seed=1, dtype=torch.float64)
        y = call(gate, up).sum()
        dgate, dup = torch.autograd.grad(y, (gate, up), create_graph=True)
        (y + dgate.square().sum() + dup.square().sum()).backward()
        grads.append((gate.grad, up.grad))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("num_rows", [None, 2])
@pytest.mark.parametrize("form", FORMS)
def test_c54_second_derivatives(form, num_rows):
    """C54. Against finite differences; rows beyond the limit hold NaN and give zeros."""
    gate, up = leaf(3, 2, seed=0, dtype=torch.float64), leaf(3, 2, seed=1, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda g, u: FORMS[form](g, u, num_rows), (gate, up))
    with torch.no_grad():
        gate[2], up[2] = float("nan"), float("nan")
    (dgate,) = torch.autograd.grad(FORMS[form](gate, up, 2).square().sum(), gate, create_graph=True)
    dgate.square().sum().backward()
    assert torch.equal(gate.grad[2], torch.zeros(2, dtype=torch.float64))
    assert bool(gate.grad[:2].isfinite().all())


@pytest.mark.parametrize("form", FORMS)
def test_transforms_of_torch_func(form):
    gate, up = (leaf(3, 4, seed=s, dtype=torch.float64).detach() for s in range(2))
    got = torch.func.vmap(torch.func.grad(lambda g, u: FORMS[form](g, u).sum()))(gate, up)
    plain = gate.clone().requires_grad_()
    (F.silu(plain) * up).sum().backward()
    # a transform differentiates the formula: other roundoffs than the kernel of silu's backward
    torch.testing.assert_close(got, plain.grad, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("call, message", [
    (lambda: silu_and_mul(torch.ones(2, 3), torch.ones(2, 4)), r"one shape, dtype and device, got \(2, 3\)"),
    (lambda: silu_and_mul(torch.ones(2, 3), torch.ones(2, 3).half()), "torch.float16"),
    (lambda: silu_and_mul(torch.ones(2, 3).int(), torch.ones(2, 3).int()), "needs a floating-point tensor"),
    (lambda: silu_and_mul_pairs(torch.ones(2, 3)), r"must be \[..., H, 2\], got \(2, 3\)"),
    (lambda: silu_and_mul_halves(torch.ones(2, 3)), r"must be \[..., 2 H\], got \(2, 3\)"),
    (lambda: silu_and_mul(torch.ones(2, 3), torch.ones(2, 3), num_rows=-1), "num_rows must be None, an integer >= 0"),
    (lambda: silu_and_mul(torch.ones(2, 3), torch.ones(2, 3), num_rows=True), "got True"),
    (lambda: silu_and_mul(torch.ones(()), torch.ones(()), num_rows=1), "needs at least one dim"),
    (lambda: silu_and_mul(torch.ones(2, 3), torch.ones(2, 3), num_rows=torch.ones(2)), "integer tensor of one element"),
])  # fmt: skip
def test_wrong_use(call, message):
    with pytest.raises(GTPValueError, match=message):
        call()


def check_kernel(device: str) -> None:
    """The kernel's launchers against torch's path, on any device that Triton can run on."""
    from gtp.ops.kernels.silu import silu_and_mul_backward, silu_and_mul_forward

    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (None, 5, torch.tensor(5, dtype=torch.int32)):
            generator = torch.Generator().manual_seed(0)
            pairs = torch.randn(7, 1030, 2, generator=generator).to(dtype)
            dy = torch.randn(7, 1030, generator=generator).to(dtype)
            if num_rows is not None:
                pairs[5:], dy[5:] = float("nan"), float("nan")
            pairs = pairs.requires_grad_()
            want = silu_and_mul_pairs(pairs, num_rows=num_rows)
            want.backward(dy)
            limit = num_rows.to(device) if isinstance(num_rows, torch.Tensor) else num_rows
            on_device, dy = pairs.detach().to(device), dy.to(device)
            out = torch.empty(7, 1030, dtype=dtype, device=device)
            dpairs = torch.empty_like(on_device)
            silu_and_mul_forward(on_device[..., 0], on_device[..., 1], limit, out)
            silu_and_mul_backward(dy, on_device[..., 0], on_device[..., 1], limit, dpairs[..., 0], dpairs[..., 1])
            # both round once; exp may differ by a few fp32 roundoffs, which can move a bf16 value to its neighbour
            rtol = 2e-6 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(out.cpu(), want.detach(), rtol=rtol, atol=1e-6)
            torch.testing.assert_close(dpairs.cpu(), pairs.grad, rtol=rtol, atol=1e-6)


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.skipif(find_spec("numpy") is None, reason="Triton's interpreter needs numpy")
@pytest.mark.process(
    "-c",
    "from tests.ops.test_swiglu import check_kernel; check_kernel('cpu'); print('right')",
    env={"TRITON_INTERPRET": "1"},
)
def test_kernel_in_the_interpreter(process: Ended):
    """Triton's interpreter runs the kernel without a GPU. In a process of its own: the switch is read at import."""
    assert process.stdout.split() == ["right"]


@pytest.mark.gpu
def test_kernel_on_the_gpu():
    check_kernel("cuda")


@pytest.mark.gpu
def test_gpu_dispatches_to_the_kernel_and_does_not_read_the_limit():
    gate, up = leaf(8, 64, seed=0).detach().cuda().requires_grad_(), leaf(8, 64, seed=1).detach().cuda()
    limit = torch.tensor(3, device="cuda")
    silu_and_mul(gate, up, num_rows=limit).sum().backward()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # a host read would break the capture
        y = silu_and_mul(gate, up, num_rows=limit)
    limit.fill_(5)
    graph.replay()
    torch.testing.assert_close(y[:5], F.silu(gate[:5]) * up[:5], rtol=2e-6, atol=1e-6)
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))

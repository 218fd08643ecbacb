"""`gtp.ops.layernorm_linear`: the bits of torch's norm and `F.linear`, without keeping the norm's output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gtp.errors import GTPStateError, GTPValueError, UnsupportedError
from gtp.ops import layernorm_linear, norm
from gtp.testing.fakes import FakeDistributedWeight
from tests.ops.managed import equal, exact_fake, gradients, plain_weight

KINDS = ["LayerNorm", "RMSNorm"]
EPS = 1e-4


def torch_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, kind: str) -> torch.Tensor:
    if kind == "LayerNorm":
        return F.layer_norm(x, gamma.shape, gamma, beta, EPS)
    return F.rms_norm(x, gamma.shape, gamma, EPS)


def problem(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...] = (3, 4, 6), rows: int = 5
) -> tuple[torch.Tensor | None, ...]:
    """dy, x, gamma, beta, full weight, bias."""
    torch.manual_seed(0)
    width = shape[-1]
    made = [torch.randn(*s).to(dtype) for s in [(*shape[:-1], rows), shape, (width,), (width,), (rows, width), (rows,)]]
    if kind == "RMSNorm":
        made[3] = None
    return tuple(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", ["fake", "plain"])
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 6), (7, 6), (0, 6)], ids=str)
def test_bits_are_those_of_torch(
    kind: str, weight: str, zero_centered: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    dy, x, gamma, beta, full, bias = problem(kind, dtype, shape)

    def ours(*args: torch.Tensor) -> torch.Tensor:
        return layernorm_linear(*args, normalization=kind, eps=EPS, zero_centered_gamma=zero_centered)

    def torchs(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not zero_centered:
            return F.linear(torch_norm(x, g, b, kind), w, bias)
        wide = torch.promote_types(dtype, torch.float32)
        normed = torch_norm(x.to(wide), 1 + g.to(wide), None if b is None else b.to(wide), kind)
        return F.linear(normed.to(dtype), w, bias)

    made = exact_fake(full) if weight == "fake" else plain_weight(full)
    got = gradients(ours, dy, x, gamma, beta, made, bias)
    assert equal(got, gradients(torchs, dy, x, gamma, beta, plain_weight(full), bias)) == [True] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_derivatives(kind: str) -> None:
    _, x, gamma, beta, full, bias = problem(kind, torch.float64)
    leaves = [None if t is None else t.requires_grad_() for t in (x, gamma, beta, full, bias)]
    assert torch.autograd.gradcheck(
        lambda *args: layernorm_linear(*args, normalization=kind, zero_centered_gamma=True), leaves
    )


@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_its_formula(kind: str) -> None:
    _, x, gamma, beta, _, _ = problem(kind, torch.float64)
    centered = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    formula = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + gamma)
    formula = formula if beta is None else formula + beta
    got = norm(x, gamma, beta, normalization=kind, eps=EPS, zero_centered_gamma=True)
    # fp64, sums of 6 numbers of size 1 in another order
    torch.testing.assert_close(got, formula, rtol=1e-13, atol=1e-13)


def test_a_small_zero_centered_gamma_survives_bfloat16() -> None:
    x = torch.tensor([[1.0, -1.0]]).bfloat16()
    gamma = torch.full((2,), 2.0**-9).bfloat16()  # 1 + gamma is 1 in bfloat16
    full = torch.tensor([[512.0, 0.0]]).bfloat16()
    y = norm(x.float(), gamma.float(), zero_centered_gamma=True, eps=0.0)
    assert torch.equal(norm(x, gamma, zero_centered_gamma=True, eps=0.0), y.bfloat16())
    assert y[0, 0].item() == 1 + 2.0**-9
    assert layernorm_linear(x, gamma, None, full, zero_centered_gamma=True, eps=0.0).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_the_norms_output_is_not_kept(kind: str) -> None:
    _, x, gamma, beta, full, _ = problem(kind, torch.float32, (64, 32), 8)
    x.requires_grad_()

    def kept(weight: torch.Tensor) -> int:
        """Bytes of distinct storages of activation size that the graph holds, beside the input's."""
        held: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.numel() >= x.numel() and t.data_ptr() != x.data_ptr():
                held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            alive.append(t)
            return t

        alive: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layernorm_linear(x, gamma, beta, weight, normalization=kind)
        return sum(held.values())

    assert kept(plain_weight(full)) - kept(exact_fake(full)) == x.numel() * 4
    if kind == "LayerNorm":
        assert kept(exact_fake(full)) == 0


def test_routes() -> None:
    weight = FakeDistributedWeight(torch.eye(4), rows=(1, 3))
    x = torch.tensor([[1.0, -1, 1, -1]], requires_grad=True)
    y = layernorm_linear(x, torch.ones(4), None, weight, eps=0.0)
    assert torch.equal(y, 2 * x)
    assert weight.live_full_weights == 0
    y.backward(torch.tensor([[1.0, 2, 3, 4]]))
    assert weight.methods == [
        "materialize_group_for_forward",
        "grad_buffer",
        "finalize_group_grads",
        "materialize_group_for_backward",
    ]
    assert torch.equal(weight.grad, 5 * torch.tensor([[2.0], [3.0]]) * x.detach())


def test_only_the_norm_is_trained() -> None:
    weight, gamma = exact_fake(torch.randn(4, 3), requires_grad=False), torch.ones(3, requires_grad=True)
    plain = gamma.detach().clone().requires_grad_()
    x = torch.randn(2, 3)
    layernorm_linear(x, gamma, None, weight).sum().backward()
    F.linear(F.layer_norm(x, (3,), plain), weight.fake.full).sum().backward()
    assert weight.methods == ["materialize_group_for_forward", "materialize_group_for_backward"]
    assert torch.equal(gamma.grad, plain.grad)


def test_gradient_asked_for_the_input_alone_reduces_nothing() -> None:
    weight = exact_fake(torch.randn(4, 3))
    x = torch.randn(2, 3, requires_grad=True)
    torch.autograd.grad(layernorm_linear(x, torch.ones(3), None, weight).sum(), x)
    assert weight.methods == ["materialize_group_for_forward", "materialize_group_for_backward"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(kind: str, use_reentrant: bool) -> None:
    dy, x, gamma, beta, full, bias = problem(kind, torch.float32)

    def recomputed(*args: torch.Tensor) -> torch.Tensor:
        run: Callable[..., torch.Tensor] = lambda *a: layernorm_linear(*a, normalization=kind).sin()  # noqa: E731
        return checkpoint(run, *args, use_reentrant=use_reentrant)

    def torchs(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, g.shape, g, b) if kind == "LayerNorm" else F.rms_norm(x, g.shape, g, 1e-5)
        return F.linear(normed, w, bias).sin()

    got = gradients(recomputed, dy, x, gamma, beta, exact_fake(full), bias)
    assert equal(got, gradients(torchs, dy, x, gamma, beta, plain_weight(full), bias)) == [True] * 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_autocast_is_that_of_torch(kind: str, zero_centered: bool) -> None:
    dy, x, gamma, beta, full, bias = problem(kind, torch.float32)

    def run(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layernorm_linear(*args, normalization=kind, zero_centered_gamma=zero_centered)

    got = gradients(run, dy.bfloat16(), x, gamma, beta, exact_fake(full), bias)
    assert equal(got, gradients(run, dy.bfloat16(), x, gamma, beta, plain_weight(full), bias)) == [True] * 6
    assert got[0].dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_is_that_of_torch_on_cuda(kind: str, dtype: torch.dtype) -> None:
    dy, x, gamma, beta, full, bias = (
        None if t is None else t.cuda() for t in problem(kind, torch.float32, (64, 32), 16)
    )

    def run(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layernorm_linear(*args, normalization=kind)

    got = gradients(run, dy.bfloat16(), x.to(dtype), gamma, beta, exact_fake(full), bias)
    wanted = gradients(run, dy.bfloat16(), x.to(dtype), gamma, beta, plain_weight(full), bias)
    assert equal(got, wanted) == [True] * 6


def test_what_is_refused() -> None:
    x, gamma = torch.ones(2, 3), torch.ones(3)
    weight = exact_fake(torch.randn(4, 3), label="up.weight")
    with pytest.raises(GTPValueError, match="'LayerNorm' or 'RMSNorm', got 'BatchNorm'"):
        layernorm_linear(x, gamma, None, weight, normalization="BatchNorm")
    with pytest.raises(GTPValueError, match="'RMSNorm' has no bias"):
        layernorm_linear(x, gamma, gamma, weight, normalization="RMSNorm")
    with pytest.raises(UnsupportedError, match=r"'up.weight'.*given to layernorm_linear as norm_weight"):
        layernorm_linear(x, weight, None, torch.randn(4, 3))
    with pytest.raises(GTPValueError, match=r"takes an input \[\*, 3\], got \(2, 5\)"):
        layernorm_linear(torch.ones(2, 5), torch.ones(5), None, weight)
    assert weight.methods == []
    leaf = x.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="double backward"):
        layernorm_linear(leaf, gamma, None, weight).sum().backward(create_graph=True)
    y = layernorm_linear(leaf, gamma, None, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(GTPStateError, match="changed in place between its forward and this backward"):
        y.sum().backward()

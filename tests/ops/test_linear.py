"""`gtp.ops.linear`: the bits of `F.linear`, and the contract's calls in the right order. Fakes in one process.

One test: `pytest tests/ops/test_linear.py -k wgrad_first`. What several ranks add is tested in tests/weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gtp.errors import GTPStateError, GTPValueError, ProtocolError, UnsupportedError
from gtp.ops import linear
from gtp.testing.fakes import VIOLATIONS, FakeDistributedWeight, Violation, violating_weight
from tests.ops.managed import equal, exact_fake, gradients, plain_weight

FORWARD, BACKWARD = "materialize_group_for_forward", "materialize_group_for_backward"
BUFFER, FINALIZE = "grad_buffer", "finalize_group_grads"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def inputs(a: int, b: int, k: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Inputs of every layout that people produce; `[a, b, k]` or flatter."""
    yield "1-d", torch.randn(k, dtype=dtype)
    yield "2-d", torch.randn(a * b, k, dtype=dtype)
    yield "2-d transposed", torch.randn(k, a * b, dtype=dtype).t()
    yield "2-d every second row", torch.randn(2 * a * b, k, dtype=dtype)[::2]
    yield "3-d", torch.randn(a, b, k, dtype=dtype)
    yield "3-d batch second", torch.randn(b, a, k, dtype=dtype).transpose(0, 1)
    yield "3-d features second", torch.randn(a, k, b, dtype=dtype).transpose(1, 2)
    yield "3-d every second feature", torch.randn(a, b, 2 * k, dtype=dtype)[..., ::2]
    yield "3-d expanded", torch.randn(1, b, k, dtype=dtype).expand(a, b, k)
    yield "4-d", torch.randn(2, a, b, k, dtype=dtype)
    yield "4-d transposed", torch.randn(a, 2, b, k, dtype=dtype).transpose(0, 1)


def output_gradients(y: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "contiguous", torch.randn_like(y, memory_format=torch.contiguous_format)
    yield "transposed", torch.randn(y.shape[::-1], dtype=y.dtype).permute(*range(y.dim() - 1, -1, -1))
    yield "one number", torch.ones((), dtype=y.dtype).expand(y.shape)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_torch_in_every_layout(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    wrong = []
    for (a, b, k, n), trainable in itertools.product([(3, 5, 7, 11), (2, 17, 33, 18)], [True, False]):
        weight = torch.randn(n, k, dtype=dtype)
        b_ = torch.randn(n, dtype=dtype) if bias else None
        for name, x in inputs(a, b, k, dtype):
            for dy_name, dy in output_gradients(F.linear(x, weight, b_)):
                plain, fake = (make(weight, requires_grad=trainable) for make in (plain_weight, exact_fake))
                same = equal(gradients(linear, dy, x, fake, b_), gradients(F.linear, dy, x, plain, b_))
                if not all(same):
                    wrong.append((name, dy_name, "trainable" if trainable else "frozen", same))
    assert wrong == []


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_forward_bits_without_a_graph(mode: str) -> None:
    torch.manual_seed(0)
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    weight = torch.nn.Parameter(torch.randn(11, 7), requires_grad=mode != "grad")
    fake = exact_fake(weight, requires_grad=mode != "grad")
    for name, x in inputs(3, 5, 7, torch.float32):
        with context():
            y = linear(x, fake)
            assert torch.equal(y, F.linear(x, weight)), name
        assert y.grad_fn is None
    assert fake.live_full_weights == 0
    assert set(fake.methods) == {FORWARD}


# --- routes


def test_wgrad_first() -> None:
    weight = FakeDistributedWeight(torch.eye(4), rows=(1, 3))
    x = torch.randn(2, 4, requires_grad=True)
    y = linear(x, weight)
    assert torch.equal(y, 2 * x)
    assert weight.methods == [FORWARD]
    y.backward(torch.ones(2, 4))
    assert weight.methods == [FORWARD, BUFFER, FINALIZE, BACKWARD]
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))
    assert torch.equal(weight.grad, 5 * x.detach().sum(0).expand(2, 4))
    assert weight.calls[2].buffers == (True,), "the wgrad is not in the buffer that was handed out"


def test_no_regather_where_the_input_needs_no_gradient() -> None:
    weight = exact_fake(torch.randn(4, 3))
    linear(torch.randn(2, 3), weight, torch.randn(4, requires_grad=True)).sum().backward()
    assert weight.methods == [FORWARD, BUFFER, FINALIZE]


def test_no_reduction_where_the_weight_is_frozen() -> None:
    weight = exact_fake(torch.randn(4, 3), requires_grad=False)
    x = torch.randn(2, 3, requires_grad=True)
    y = linear(x, weight, torch.randn(4))
    assert y.grad_fn.saved_tensors == (), "the input is kept although nothing needs it"
    y.sum().backward()
    assert weight.methods == [FORWARD, BACKWARD]
    assert weight.grad is None


def test_only_the_bias_is_trained() -> None:
    weight, bias = exact_fake(torch.randn(4, 3), requires_grad=False), torch.randn(4, requires_grad=True)
    linear(torch.randn(2, 3), weight, bias).sum().backward()
    assert weight.methods == [FORWARD]
    assert torch.equal(bias.grad, torch.full((4,), 2.0))


def test_gradient_asked_for_the_input_alone_reduces_nothing() -> None:
    weight = exact_fake(torch.randn(4, 3))
    x = torch.randn(2, 3, requires_grad=True)
    torch.autograd.grad(linear(x, weight).sum(), x)
    assert weight.methods == [FORWARD, BACKWARD]


def test_the_graph_holds_the_input_and_the_weight_itself() -> None:
    saved: list[torch.Tensor] = []
    weight = exact_fake(torch.randn(4, 3), rows=(0, 2))
    x = torch.randn(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x, weight)
    assert [t is x for t in saved] == [True]
    assert y.grad_fn.weight is weight
    assert weight.live_full_weights == 0
    y.sum().backward()
    assert weight.live_full_weights == 0


def test_a_full_weight_that_requires_grad_is_not_held_by_a_frozen_one() -> None:
    class FullRequiresGrad(FakeDistributedWeight):
        def materialize_group_for_forward(self, **options: object) -> torch.Tensor:
            return super().materialize_group_for_forward(**options).requires_grad_()

    weight = FullRequiresGrad(torch.randn(4, 3), requires_grad=False)
    y = linear(torch.randn(2, 3), weight)
    assert not y.requires_grad
    assert weight.live_full_weights == 0


def test_no_rows_give_no_output_and_a_zero_gradient_that_is_reduced() -> None:
    weight, bias = exact_fake(torch.randn(4, 3)), torch.randn(4, requires_grad=True)
    x = torch.randn(2, 0, 3, requires_grad=True)
    y = linear(x, weight, bias)
    assert y.shape == (2, 0, 4)
    y.sum().backward()
    assert weight.methods == [FORWARD, BUFFER, FINALIZE, BACKWARD]
    assert torch.equal(weight.grad, torch.zeros(4, 3))
    assert torch.equal(bias.grad, torch.zeros(4))
    assert x.grad.shape == x.shape


def test_a_part_of_the_graph_that_got_no_gradient_is_reduced_as_zero() -> None:
    # ranks must agree on reductions, whatever their losses look at
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> None:
            return None

    weight = exact_fake(torch.randn(4, 3))
    Cut.apply(linear(torch.randn(2, 3), weight)).sum().backward()
    assert FINALIZE in weight.methods
    assert torch.equal(weight.grad, torch.zeros(4, 3))


@pytest.mark.parametrize("mode", ["ready", "deferred", "main_grad"])
def test_every_outcome_accumulates_over_uses_and_backwards(mode: str) -> None:
    weight = FakeDistributedWeight(torch.eye(3), mode=mode, scale_finalize=1)
    ones = torch.ones(1, 3)
    (linear(ones, weight) + linear(2 * ones, weight)).sum().backward()
    linear(4 * ones, weight).sum().backward()
    got = weight.main_grad if mode == "main_grad" else weight.grad
    assert torch.equal(got, torch.full((3, 3), 7.0))


def test_post_accumulate_hooks_see_a_ready_gradient() -> None:
    weight = exact_fake(torch.randn(4, 3))
    seen = []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    linear(torch.ones(2, 3), weight).sum().backward()
    assert [torch.equal(grad, torch.full((4, 3), 2.0)) for grad in seen] == [True]


# --- dtypes of the buffer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_buffer_gets_the_converted_wgrad(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    full, x, dy = (torch.randn(*s).to(dtype) for s in [(4, 3), (5, 3), (5, 4)])
    weight = exact_fake(full, buffer_dtype=torch.float32, mode="main_grad")
    linear(x, weight).backward(dy)
    assert weight.calls[2].buffers == (True,)
    assert torch.equal(weight.main_grad, (dy.t() @ x).float())


@pytest.mark.gpu
def test_on_cuda_a_float32_buffer_gets_the_unrounded_wgrad() -> None:
    torch.manual_seed(0)
    full, x, dy = (torch.randn(*s, device="cuda").bfloat16() for s in [(64, 128), (512, 128), (512, 64)])
    weight = exact_fake(full, buffer_dtype=torch.float32, mode="main_grad")
    linear(x, weight).backward(dy)
    exact = dy.double().t() @ x.double()
    # fp32 accumulation over 512 products of bf16 numbers of size 1; rounding to bf16 would cost up to 2^-9 of 100
    assert (weight.main_grad - exact).abs().max().item() < 1e-3
    assert ((dy.t() @ x).double() - exact).abs().max().item() > 1e-2


@pytest.mark.gpu
def test_bits_are_those_of_torch_on_cuda() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x, full, bias = (torch.randn(*s, device="cuda").to(dtype) for s in [(4, 32, 64), (48, 64), (48,)])
        dy = torch.randn(4, 32, 48, device="cuda").to(dtype)
        assert equal(gradients(linear, dy, x, exact_fake(full), bias), gradients(F.linear, dy, x, full, bias)) == (
            [True] * 4
        )


# --- plain weights


def test_a_plain_weight_takes_torchs_own_path() -> None:
    x, weight, bias = (torch.randn(*s, requires_grad=True) for s in [(2, 3), (4, 3), (4,)])
    assert type(linear(x, weight, bias).grad_fn).__name__ == "AddmmBackward0"
    assert torch.autograd.gradgradcheck(
        lambda x, w: linear(x, w), [t.detach().double().requires_grad_() for t in (x, weight)]
    )


def megatron_weight(full: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(full.clone())
    weight.main_grad = torch.zeros(full.shape, dtype=dtype)
    weight.grad_added_to_main_grad = False
    return weight


def test_main_grad_collects_the_bits_that_grad_would() -> None:
    torch.manual_seed(0)
    full, bias = torch.randn(5, 33), torch.randn(5)
    plain, collecting = torch.nn.Parameter(full.clone()), megatron_weight(full)
    for micro in range(3):
        x = torch.randn(7, 33, requires_grad=True)
        x2 = x.detach().requires_grad_()
        linear(x, collecting, bias).square().sum().backward()
        F.linear(x2, plain, bias).square().sum().backward()
        assert torch.equal(x.grad, x2.grad), micro
    assert collecting.grad_added_to_main_grad
    assert torch.equal(collecting.main_grad, plain.grad)
    assert collecting.grad.shape == full.shape, "the placeholder"


def test_main_grad_of_a_low_precision_weight_adds_in_its_own_dtype() -> None:
    weight = megatron_weight(torch.zeros(1, 1).bfloat16())
    for value in (256.0, 1.0):
        linear(torch.full((1, 1), value).bfloat16(), weight).sum().backward()
    assert weight.main_grad.item() == 257.0  # bfloat16 has no 257


def test_zero_out_wgrad_gives_a_zero_placeholder() -> None:
    weight = megatron_weight(torch.randn(4, 3))
    weight.zero_out_wgrad = True
    linear(torch.ones(2, 3), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(4, 3))
    assert torch.equal(weight.main_grad, torch.full((4, 3), 2.0))


def test_main_grad_without_the_flag_is_left_alone() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    weight.main_grad = torch.zeros(4, 3)
    linear(torch.ones(2, 3), weight).sum().backward()
    assert torch.equal(weight.main_grad, torch.zeros(4, 3))
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))


# --- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["fake", "main_grad"])
def test_autocast_is_that_of_torch(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    x, full, bias, dy = torch.randn(3, 5, 17), torch.randn(9, 17), torch.randn(9), torch.randn(3, 5, 9).to(dtype)

    def under_autocast(function: object) -> object:
        def run(*args: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return function(*args)

        return run

    wanted = gradients(under_autocast(F.linear), dy, x, full, bias)
    weight = exact_fake(full) if kind == "fake" else megatron_weight(full)
    leaves = [x.clone().requires_grad_(), weight, bias.clone().requires_grad_()]
    y = under_autocast(linear)(*leaves)
    y.backward(dy)
    weight_grad = weight.grad if kind == "fake" else weight.main_grad
    got = [y.detach(), leaves[0].grad, weight_grad, leaves[2].grad]
    assert equal(got, wanted) == [True] * 4
    assert y.dtype is dtype


def test_autocast_leaves_float64_alone() -> None:
    x, full = torch.randn(2, 3).double(), torch.randn(4, 3).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x, exact_fake(full)), F.linear(x, full))
        assert linear(x, exact_fake(full)).dtype is torch.float64


def test_autocast_keeps_no_copy_of_the_full_weight() -> None:
    # torch's autocast caches what it casts until its context ends: full weights of all layers, if it saw them
    class FullRequiresGrad(FakeDistributedWeight):
        def materialize_group_for_forward(self, **options: object) -> torch.Tensor:
            return super().materialize_group_for_forward(**options).requires_grad_()

    weight = FullRequiresGrad(torch.randn(64, 64))
    x = torch.randn(2, 64)
    casts: list[torch.Size] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            if "_to_copy" in str(func):
                casts.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        linear(x, weight)
        linear(x, weight)
    assert casts.count(torch.Size([64, 64])) == 2, "the second use found the first one's copy"


# --- recomputation and hooks on what is saved


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("mode", ["ready", "deferred", "main_grad"])
def test_checkpointing(mode: str, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    full, x, dy = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 4)
    weight = exact_fake(full, mode=mode)
    leaf = x.clone().requires_grad_()
    checkpoint(lambda x: linear(x, weight).sin(), leaf, use_reentrant=use_reentrant).backward(dy)
    wanted = gradients(lambda x, w: F.linear(x, w).sin(), dy, x, full)
    assert torch.equal(leaf.grad, wanted[1])
    assert torch.equal(weight.main_grad if mode == "main_grad" else weight.grad, wanted[2])
    assert weight.methods == [FORWARD, FORWARD, BUFFER, FINALIZE, BACKWARD]


def test_hooks_that_replace_what_is_saved_do_not_reach_the_weight() -> None:
    weight = exact_fake(torch.randn(4, 3))
    x = torch.randn(2, 3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = linear(x, weight)
    y.sum().backward()
    assert weight.methods == [FORWARD, BUFFER, FINALIZE, BACKWARD]


# --- what is refused


@pytest.mark.parametrize("kind", ["fake", "main_grad"])
def test_double_backward_is_refused_before_anything_is_asked(kind: str) -> None:
    full = torch.randn(4, 3)
    weight = exact_fake(full, label="up.weight") if kind == "fake" else megatron_weight(full)
    x = torch.randn(2, 3, requires_grad=True)
    y = linear(x, weight)
    with pytest.raises(UnsupportedError, match=r"double backward \(create_graph=True\) is not supported.*exclude="):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    if kind == "fake":
        assert weight.methods == [FORWARD]


def test_a_weight_changed_between_forward_and_backward_is_an_error() -> None:
    weight = exact_fake(torch.randn(4, 3), label="up.weight")
    y = linear(torch.randn(2, 3, requires_grad=True), weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(
        GTPStateError, match=r"'up.weight'.*changed in place.*version 0 became 1.*Step the optimizer after"
    ):
        y.sum().backward()
    assert weight.methods == [FORWARD]


def test_a_changed_weight_is_no_error_where_backward_does_not_need_it() -> None:
    weight = exact_fake(torch.randn(4, 3))
    y = linear(torch.ones(2, 3), weight)
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.ones(2, 4), r"'up.weight'.*takes an input \[\*, 3\], got \(2, 4\)"),
        (torch.ones(()), r"takes an input \[\*, 3\], got \(\)"),
    ],
)
def test_a_wrong_shape_is_refused_before_anything_is_asked(x: torch.Tensor, message: str) -> None:
    weight = exact_fake(torch.randn(4, 3), label="up.weight")
    with pytest.raises(GTPValueError, match=message):
        linear(x, weight)
    assert weight.methods == []


def test_a_weight_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'up.weight'.*linear takes a 2-d weight"):
        linear(torch.ones(2, 3), exact_fake(torch.randn(3), label="up.weight"))


def test_another_dtype_is_refused_with_what_to_do() -> None:
    with pytest.raises(GTPValueError, match=r"full weight is torch.bfloat16 and the input is torch.float32.*autocast"):
        linear(torch.ones(2, 3), exact_fake(torch.randn(4, 3).bfloat16()))


@pytest.mark.parametrize("plain_weight", [True, False])
def test_a_distributed_weight_elsewhere_is_refused(plain_weight: bool) -> None:
    fake = exact_fake(torch.randn(4, 3), label="up.weight")
    weight = torch.randn(4, 3) if plain_weight else exact_fake(torch.randn(4, 3))
    with pytest.raises(UnsupportedError, match=r"'up.weight'.*given to linear as input.*as the weight alone"):
        linear(fake, weight)
    with pytest.raises(UnsupportedError, match="given to linear as bias"):
        linear(torch.ones(2, 3), weight, exact_fake(torch.randn(4)))


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda v: f"{v.method}-{v.kind}")
def test_every_broken_rule_is_a_protocol_error_with_the_weights_name(violation: Violation) -> None:
    weight = violating_weight(torch.randn(4, 3), violation, rows=(0, 2), label="up.weight")
    with pytest.raises(ProtocolError, match=f"{violation.method} of weight 'up.weight'"):
        linear(torch.ones(2, 3, requires_grad=True), weight).sum().backward()
    assert violation.method in weight.methods


def test_nobody_reads_memory_that_nobody_wrote() -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN from here on
    try:
        for dtype in (torch.float32, torch.bfloat16):
            weight = exact_fake(torch.ones(4, 3, dtype=dtype), buffer_dtype=torch.float32)
            x = torch.ones(2, 3, dtype=dtype, requires_grad=True)
            linear(x, weight).sum().backward()
            assert torch.equal(weight.grad.float(), torch.full((4, 3), 2.0))
            assert torch.equal(x.grad.float(), torch.full((2, 3), 4.0))
    finally:
        torch.use_deterministic_algorithms(deterministic)

"""`gtp.ops.grouped_linear`: a loop of `F.linear`, over weights that are asked as one group."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gtp.errors import GTPStateError, GTPValueError, ProtocolError, UnsupportedError
from gtp.ops import grouped_linear, grouped_mlp
from gtp.testing.fakes import FakeDistributedWeight
from tests.ops.managed import equal, plain_weight

FORWARD, BACKWARD = "materialize_group_for_forward", "materialize_group_for_backward"
BUFFER, FINALIZE = "grad_buffer", "finalize_group_grads"


def loop(
    x: torch.Tensor, splits: Sequence[int], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """The reference: one `F.linear` per expert, the padding zero."""
    blocks = x.reshape(-1, x.shape[-1]).split([*splits, x[..., 0].numel() - sum(splits)])
    out = [F.linear(b, w, biases[i] if biases else None) for i, (b, w) in enumerate(zip(blocks, weights, strict=False))]
    return torch.cat([*out, out[0].new_zeros(blocks[-1].shape[0], out[0].shape[-1])]).view(*x.shape[:-1], -1)


class Problem:
    """Weights as fakes or plain ones, over the same numbers."""

    def __init__(self, experts: int, rows: int, *, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.fulls = [torch.randn(12, 8, dtype=dtype) for _ in range(experts)]
        self.biases = [torch.randn(12, dtype=dtype) for _ in range(experts)] if bias else None
        self.x = torch.randn(rows, 8, dtype=dtype)
        self.dy = torch.randn(rows, 12, dtype=dtype)

    def fakes(self, **options: object) -> list[FakeDistributedWeight]:
        scales = {"scale_forward": 1, "scale_backward": 1, "scale_finalize": 1}
        return FakeDistributedWeight.make_group(self.fulls, **(scales | options))

    def run(self, function: object, weights: Sequence[torch.Tensor], splits: object, dtype: object = None) -> list:
        x = self.x.clone().requires_grad_()
        biases = [b.clone().requires_grad_() for b in self.biases] if self.biases else None
        y = function(x, splits, weights, biases)
        y.backward(self.dy.to(y.dtype))
        return [y.detach(), x.grad, *[w.grad for w in weights], *[b.grad for b in biases or []]]


@pytest.mark.parametrize("splits", [[5, 0, 3, 0], [0, 0, 0, 8], [2, 2, 2, 2], [0, 0, 0, 0], [1, 0, 4, 1]], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bits_are_those_of_a_loop(splits: list[int], bias: bool, dtype: torch.dtype) -> None:
    problem = Problem(4, 8, dtype=dtype, bias=bias)
    fakes = problem.fakes()
    wanted = problem.run(loop, [plain_weight(f) for f in problem.fulls], splits)
    assert all(equal(problem.run(grouped_linear, fakes, splits), wanted))
    assert all(equal(problem.run(grouped_linear, [plain_weight(f) for f in problem.fulls], splits), wanted))
    assert fakes[0].methods == [FORWARD, BUFFER, BUFFER, BUFFER, BUFFER, FINALIZE, BACKWARD]
    for weight, rows in zip(fakes, splits, strict=True):
        assert rows or torch.equal(weight.grad, torch.zeros(12, 8, dtype=dtype)), "no tokens, exact zeros"


@pytest.mark.parametrize(
    "splits",
    [
        torch.tensor([3, 0, 5]),
        torch.tensor([3, 0, 5], dtype=torch.int32),
        torch.histc(torch.tensor([0.0, 0, 0, 2, 2, 2, 2, 2]), bins=3, min=0, max=2),  # counts, in float32
        list(torch.tensor([3, 0, 5])),
        (3, 0, 5),
        range(3, 9, 3),
        numpy.array([3, 0, 5]),
        [numpy.int64(3), numpy.int32(0), numpy.uint8(5)],
    ],
    ids=repr,
)
def test_splits_may_be_whole_numbers_of_any_kind(splits: Sequence[int]) -> None:
    rows = [int(n) for n in splits]
    problem = Problem(len(rows), 9)
    wanted = problem.run(loop, [plain_weight(f) for f in problem.fulls], rows)
    assert all(equal(problem.run(grouped_linear, problem.fakes(), splits), wanted))
    fc1, fc2 = [torch.ones(4, 8) for _ in rows], [torch.ones(8, 2) for _ in rows]
    assert torch.equal(grouped_mlp(problem.x, splits, fc1, fc2), grouped_mlp(problem.x, rows, fc1, fc2))


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("kind", ["fakes", "plain"])
def test_rows_beyond_the_splits_change_nothing(experts: int, fill: float, kind: str) -> None:
    # C82: 16 rows of which 10 are in the splits
    splits = [10] if experts == 1 else [4, 0, 6]
    problem, clean = Problem(experts, 16), Problem(experts, 16)
    problem.x[10:] = fill
    problem.dy[10:] = fill
    clean.x[10:] = 0
    clean.dy[10:] = 0
    weights = problem.fakes() if kind == "fakes" else [plain_weight(f) for f in problem.fulls]
    got = problem.run(grouped_linear, weights, splits)
    assert all(equal(got, clean.run(grouped_linear, [plain_weight(f) for f in clean.fulls], splits)))
    y, dx = got[:2]
    assert torch.equal(y[10:], torch.zeros(6, 12))
    assert torch.equal(dx[10:], torch.zeros(6, 8))


def test_routes_of_a_group() -> None:
    fulls = [torch.eye(2), 10 * torch.eye(2)]
    group = FakeDistributedWeight.make_group(fulls, rows=(1, 2))
    x = torch.tensor([[1.0, 2], [3, 4], [5, 6]], requires_grad=True)
    y = grouped_linear(x, [1, 2], group)
    assert torch.equal(y, torch.tensor([[2.0, 4], [60, 80], [100, 120]]))
    assert group[0].live_full_weights == group[1].live_full_weights == 0
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[3.0, 3], [30, 30], [30, 30]]))
    assert torch.equal(group[0].grad, torch.tensor([[5.0, 10]]))
    assert torch.equal(group[1].grad, torch.tensor([[40.0, 50]]))
    assert group[0].calls[3].buffers == (True, True)
    assert group[1].calls == []


@pytest.mark.parametrize("mode", ["ready", "deferred", "main_grad"])
def test_two_microbatches_accumulate_in_every_outcome(mode: str) -> None:
    problem = Problem(3, 8)
    fakes, plain = problem.fakes(mode=mode), [plain_weight(f) for f in problem.fulls]
    for splits in ([5, 0, 3], [0, 0, 8]):
        problem.run(grouped_linear, fakes, splits)
        problem.run(loop, plain, splits)
    assert [
        torch.equal(f.main_grad if mode == "main_grad" else f.grad, p.grad) for f, p in zip(fakes, plain, strict=True)
    ] == ([True] * 3)


def test_main_grad_of_plain_experts() -> None:
    # C80: two micro-batches, experts without tokens
    problem = Problem(4, 8)
    collecting, plain = [[plain_weight(f) for f in problem.fulls] for _ in range(2)]
    for weight in collecting:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(12, 8), False
    for splits in ([5, 0, 3, 0], [0, 0, 0, 8]):
        problem.run(grouped_linear, collecting, splits)
        problem.run(loop, plain, splits)
    assert [torch.equal(c.main_grad, p.grad) for c, p in zip(collecting, plain, strict=True)] == [True] * 4
    assert torch.equal(collecting[1].main_grad, torch.zeros(12, 8))
    assert all(c.grad_added_to_main_grad for c in collecting)


def test_nobody_reads_memory_that_nobody_wrote() -> None:
    # C80 and C82 with fresh memory NaN
    problem = Problem(4, 10)
    wanted = problem.run(loop, [plain_weight(f) for f in problem.fulls], [5, 0, 3, 0])
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        got = problem.run(grouped_linear, problem.fakes(), [5, 0, 3, 0])
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert all(equal(got, wanted))


def test_leading_dims_and_strides() -> None:
    problem = Problem(3, 12)
    for x in (problem.x.view(3, 4, 8), problem.x.view(4, 3, 8).transpose(0, 1), problem.x.t().contiguous().t()):
        y = grouped_linear(x, [5, 0, 7], problem.fakes())
        assert y.shape == (*x.shape[:-1], 12)
        contiguous = grouped_linear(x.contiguous(), [5, 0, 7], problem.fakes())
        torch.testing.assert_close(y, contiguous, rtol=1e-6, atol=1e-6)  # sums of 8 products in another order


def test_a_strided_gradient() -> None:
    problem = Problem(3, 8)
    wanted = problem.run(loop, [plain_weight(f) for f in problem.fulls], [3, 0, 5])
    problem.dy = problem.dy.t().contiguous().t()
    got = problem.run(grouped_linear, problem.fakes(), [3, 0, 5])
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-5)  # sums of 12 products in another order


def test_frozen_and_input_without_gradient() -> None:
    problem = Problem(2, 8)
    frozen = problem.fakes(requires_grad=False)
    problem.run(grouped_linear, frozen, [3, 5])
    assert frozen[0].methods == [FORWARD, BACKWARD]
    assert [w.grad for w in frozen] == [None, None]
    trained = problem.fakes()
    grouped_linear(problem.x, [3, 5], trained).sum().backward()
    assert trained[0].methods == [FORWARD, BUFFER, BUFFER, FINALIZE]
    asked = problem.fakes()
    x = problem.x.clone().requires_grad_()
    torch.autograd.grad(grouped_linear(x, [3, 5], asked).sum(), x)
    assert asked[0].methods == [FORWARD, BACKWARD]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph(mode: type) -> None:
    problem = Problem(2, 8)
    fakes = problem.fakes()
    with mode():
        y = grouped_linear(problem.x, [3, 5], fakes, problem.biases)
    assert torch.equal(y, loop(problem.x, [3, 5], problem.fulls, problem.biases))
    assert y.grad_fn is None
    assert [w.live_full_weights for w in fakes] == [0, 0]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    problem = Problem(3, 8)

    def recomputed(x: torch.Tensor, splits: list[int], weights: list, biases: list) -> torch.Tensor:
        return checkpoint(lambda x: grouped_linear(x, splits, weights, biases).sin(), x, use_reentrant=use_reentrant)

    def torchs(*args: object) -> torch.Tensor:
        return loop(*args).sin()

    wanted = problem.run(torchs, [plain_weight(f) for f in problem.fulls], [3, 0, 5])
    assert all(equal(problem.run(recomputed, problem.fakes(), [3, 0, 5]), wanted))


def test_autocast_is_that_of_torch() -> None:
    problem = Problem(3, 8)

    def under(function: object) -> object:
        def run(*args: object) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*args)

        return run

    wanted = problem.run(under(loop), [plain_weight(f) for f in problem.fulls], [3, 0, 5])
    got = problem.run(under(grouped_linear), problem.fakes(), [3, 0, 5])
    assert got[0].dtype is torch.bfloat16
    assert all(equal(got, wanted))


class Stacked(FakeDistributedWeight):
    """Hands out parts of one buffer at one distance, as gtp's runtime does."""

    gap = 128  # elements between two weights

    def _full_weights(self, phase: int) -> list[torch.Tensor]:
        fulls = [member.fake.full for member in self._members()]
        step = fulls[0].numel() + self.gap
        buffer = torch.full((len(fulls) * step,), float("nan"), dtype=fulls[0].dtype, device=fulls[0].device)
        parts = [buffer[i * step : i * step + full.numel()].view(full.shape) for i, full in enumerate(fulls)]
        for part, full in zip(parts, fulls, strict=True):
            part.copy_(full)
        return parts


def grouped_gemm_and_loop(device: str, out: int = 48, kind: type[FakeDistributedWeight] = Stacked) -> tuple[list, list]:
    torch.manual_seed(0)
    splits, features = [33, 0, 50, 9], 64  # and 8 rows of padding
    fulls = [torch.randn(out, features, device=device).bfloat16() for _ in range(4)]
    data = torch.randn(100, features, device=device).bfloat16()
    data[92:] = float("nan")
    results = []
    for maker in (kind, FakeDistributedWeight):
        group = maker.make_group(fulls, scale_forward=1, scale_backward=1, scale_finalize=1)
        x = data.clone().requires_grad_()
        y = grouped_linear(x, splits, group)
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *[w.grad for w in group]])
    return results[0], results[1]


def assert_same_but_for_a_last_bit(grouped: list, looped: list) -> None:
    assert torch.equal(grouped[0][92:], torch.zeros_like(grouped[0][92:]))
    assert torch.equal(grouped[1][92:], torch.zeros_like(grouped[1][92:]))
    for got, wanted in zip(grouped, looped, strict=True):
        # all accumulate at most 64 products in fp32 and round once to bf16: a last bit, 2^-8 relative; gradients are
        # computed from outputs that differ so, and are sums of up to 64 of them of size 100
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=4.0 if got is not grouped[0] else 2**-4)


@pytest.mark.gpu
def test_grouped_gemm_and_loop_agree_on_cuda() -> None:
    assert_same_but_for_a_last_bit(*grouped_gemm_and_loop("cuda"))


@pytest.mark.gpu
def test_grouped_gemm_is_captured_in_a_cuda_graph() -> None:
    """The splits are numbers on the host: nothing of them may need a copy during the capture."""
    torch.manual_seed(0)
    splits = [33, 0, 50, 9]
    group = Stacked.make_group([torch.randn(48, 64, device="cuda").bfloat16() for _ in range(4)])
    x, other = torch.randn(2, 92, 64, device="cuda").bfloat16()
    with torch.no_grad():
        expected = [grouped_linear(rows, splits, group) for rows in (x, other)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = grouped_linear(x, splits, group)
        for rows, wanted in ((x.clone(), expected[0]), (other, expected[1])):
            x.copy_(rows)
            graph.replay()
            assert torch.equal(y, wanted)


@pytest.mark.parametrize("splits", [[3], [33, 0, 50, 9], [0] * 500, list(range(300))])
def test_ends_of_experts_are_running_sums(splits: list[int]) -> None:
    ends = sys.modules["gtp.ops.grouped_linear"]._ends(splits, torch.device("cpu"))
    assert ends.dtype == torch.int32
    assert ends.tolist() == list(itertools.accumulate(splits))


@pytest.fixture
def grouped_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights of grouped GEMMs, which are made to serve bf16 on CPU too."""
    calls = []
    real = F.grouped_mm

    def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(weights.shape))
        return real(rows, weights, offs=offs)

    monkeypatch.setattr(sys.modules["gtp.ops.grouped_linear"], "_grouped_gemm_serves", lambda rows: True)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    return calls


def test_evenly_spaced_weights_take_one_grouped_gemm_each_way(grouped_calls: list[tuple[int, ...]]) -> None:
    assert_same_but_for_a_last_bit(*grouped_gemm_and_loop("cpu"))
    assert grouped_calls == [(4, 64, 48), (4, 48, 64)]


def test_other_weights_take_the_loop(grouped_calls: list[tuple[int, ...]]) -> None:
    class Uneven(Stacked):
        gap = 4  # 8 bytes

    for out, kind in ((48, FakeDistributedWeight), (44, Stacked), (48, Uneven)):
        grouped, looped = grouped_gemm_and_loop("cpu", out, kind)
        assert all(equal(grouped, looped))
    assert grouped_calls == []


# --- what is refused


@pytest.mark.parametrize(
    "splits, message",
    [
        ([3, 6], r"m_splits \[3, 6\] add up to 9 rows, the input has 8"),
        ([9, -1], r"must not be negative, got \[9, -1\]"),
        ([8], r"m_splits has 1 entries for 2 weights"),
        ([2.7, 4.2], r"must be whole numbers of rows, one per expert, got \[2.7, 4.2\]"),
        (torch.tensor([2.5, 4.0]), r"must be whole numbers of rows, one per expert, got tensor"),
        (torch.tensor([[3], [4]]), r"must be whole numbers of rows"),
        (torch.tensor(8), r"must be whole numbers of rows"),
        ([float("inf"), float("nan")], r"must be whole numbers of rows"),
        ({3: "a", 4: "b"}, r"must be whole numbers of rows"),
        ("34", r"must be whole numbers of rows"),
        (None, r"must be whole numbers of rows"),
    ],
)
@pytest.mark.parametrize("kind", ["fakes", "plain"])
def test_wrong_splits_are_refused_before_anything_is_asked(splits: list[int], message: str, kind: str) -> None:
    problem = Problem(2, 8)
    weights = problem.fakes() if kind == "fakes" else problem.fulls
    with pytest.raises(GTPValueError, match=message):
        grouped_linear(problem.x, splits, weights)
    assert kind == "plain" or weights[0].methods == []


def test_wrong_weights_are_refused_before_anything_is_asked() -> None:
    problem = Problem(2, 8)
    group = problem.fakes(label="experts.")
    with pytest.raises(GTPValueError, match="needs at least one weight"):
        grouped_linear(problem.x, [], [])
    with pytest.raises(GTPValueError, match="biases has 1 entries for 2 weights"):
        grouped_linear(problem.x, [3, 5], group, problem.biases[:1])
    with pytest.raises(UnsupportedError, match="of this group some are distributed and others not"):
        grouped_linear(problem.x, [3, 5], [group[0], plain_weight(problem.fulls[1])])
    group[1].requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"'experts.1'.*of this group some are trainable and others not"):
        grouped_linear(problem.x, [3, 5], group)
    with pytest.raises(UnsupportedError, match="given to grouped_linear as biases"):
        grouped_linear(problem.x, [3, 5], problem.fulls, problem.fakes())
    with pytest.raises(GTPValueError, match=r"'experts.0'.*takes an input \[\*, 8\], got \(8, 7\)"):
        grouped_linear(problem.x[:, :7], [3, 5], problem.fakes(label="experts."))
    assert group[0].methods == []


def test_full_weights_of_unlike_shapes_are_refused() -> None:
    group = FakeDistributedWeight.make_group([torch.ones(4, 3), torch.ones(5, 3)])
    with pytest.raises(GTPValueError, match=r"'fake1'.*must have one shape, got \(5, 3\) and \(4, 3\)"):
        grouped_linear(torch.ones(2, 3), [1, 1], group)


def test_a_group_that_forgets_a_weight_is_named() -> None:
    class Forgetful(FakeDistributedWeight):
        def materialize_group_for_backward(self, **options: object) -> list[torch.Tensor]:
            return super().materialize_group_for_backward(**options)[:1]

    group = Forgetful.make_group([torch.ones(4, 3), torch.ones(4, 3)])
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(ProtocolError, match=r"backward of weight 'fake0'.*one full weight per weight \(2\), got 1"):
        grouped_linear(x, [1, 1], group).sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_double_backward_and_changed_weights_are_refused() -> None:
    problem = Problem(2, 8)
    x = problem.x.clone().requires_grad_()
    group = problem.fakes(label="experts.")
    with pytest.raises(UnsupportedError, match="double backward"):
        grouped_linear(x, [3, 5], group).sum().backward(create_graph=True)
    y = grouped_linear(x, [3, 5], group)
    with torch.no_grad():
        group[1].zero_()
    with pytest.raises(GTPStateError, match=r"'experts.1'.*changed in place"):
        y.sum().backward()
    assert group[0].methods == [FORWARD, FORWARD]

"""The tensor-parallel modules over gloo ranks, against `nn.Linear`s with the same seed.

Values are integers after `rounded`, so sums over ranks are exact and every comparison is bit for bit; rounding is the
subject of tests/ops/test_collective_linear.py.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gtp.errors import GTPValueError
from gtp.modules import (
    ColumnParallelLinear,
    FeedForward,
    FusedQKVLinear,
    FusedSwiGLU,
    RowParallelLinear,
    swiglu_feed_forward,
)
from gtp.ops import GemmBackend, gemm_backend
from gtp.ops.collective_backends import CollectiveBackend
from gtp.testing.collectives import collective_log, late_collectives


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def fill(weight: torch.Tensor) -> None:
    """An `init_method` with integers, from the global seed."""
    weight.copy_(torch.randint(-2, 3, weight.shape).float())


def part(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None
    assert want is not None
    assert got.shape == want.shape
    assert torch.equal(got, want)


# --- column and row


def like_nn_linear(sequence_dim: int, ndim: int) -> None:
    group = dist.group.WORLD
    torch.manual_seed(3)
    stock = nn.Linear(8, 12), nn.Linear(12, 4)
    torch.manual_seed(3)
    options = {"tp_group": group, "tp_gemm_backend": "collective", "sequence_dim": sequence_dim}
    column, row = ColumnParallelLinear(8, 12, **options), RowParallelLinear(12, 4, **options)
    # one seed, one model: this rank's part of what nn.Linear draws, biases included
    same(column.weight, part(stock[0].weight, 0))
    same(column.bias, part(stock[0].bias, 0))
    same(row.weight, part(stock[1].weight, 1))
    same(row.bias, stock[1].bias)
    with torch.no_grad():
        for p in [*column.parameters(), *row.parameters(), *stock[0].parameters(), *stock[1].parameters()]:
            p.mul_(8).round_()
    shape = (8, 8) if ndim == 2 else (3, 8, 8) if sequence_dim == 1 else (8, 3, 8)
    dim = 0 if ndim == 2 else sequence_dim
    x = integers(*shape, seed=1)
    x_part, x_whole = part(x, dim).clone().requires_grad_(), x.clone().requires_grad_()
    with late_collectives():
        hidden = column(x_part)
        y = row(hidden)
        dy = integers(*shape[:-1], 4, seed=2)
        y.backward(part(dy, dim))
    hidden_whole = stock[0](x_whole)
    y_whole = stock[1](hidden_whole)
    y_whole.backward(dy)
    same(hidden, part(hidden_whole, -1))
    same(y, part(y_whole, dim))
    same(x_part.grad, part(x_whole.grad, dim))
    same(column.weight.grad, part(stock[0].weight.grad, 0))
    same(column.bias.grad, part(stock[0].bias.grad, 0))
    same(row.weight.grad, part(stock[1].weight.grad, 1))
    same(row.bias.grad, stock[1].bias.grad)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_dim, ndim", [(0, 3), (1, 3), (1, 2)])
def test_column_and_row_are_nn_linear(ranks, world, sequence_dim, ndim):
    ranks(world).run(like_nn_linear, sequence_dim, ndim)


# --- attention's projections


class ThreeLinears(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.wq = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.head_dim = head_dim

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)]


def qkv(heads: int, kv_heads: int, bias: bool) -> None:
    torch.manual_seed(5)
    stock = ThreeLinears(8, heads, kv_heads, 4, bias)
    torch.manual_seed(5)
    fused = FusedQKVLinear(8, heads, kv_heads, 4, bias, tp_group=dist.group.WORLD, tp_gemm_backend="collective")
    state, stock_state = fused.state_dict(), stock.state_dict()
    assert list(state) == list(stock_state)
    for name, value in state.items():
        same(value, part(stock_state[name], 0))
    # both layouts load: parts, and the fused parameter
    loaded = copy.deepcopy(fused)
    with torch.no_grad():
        for p in [*stock.parameters()]:
            p.mul_(8).round_()
    loaded.load_state_dict({n: part(p, 0) for n, p in stock.named_parameters()})
    fused.load_state_dict({n: p.detach().clone() for n, p in loaded.named_parameters()})
    same(fused.weight, loaded.weight)

    x = integers(3, 8, 8, seed=1)
    x_part, x_whole = part(x, 1).clone().requires_grad_(), x.clone().requires_grad_()
    with collective_log() as log:
        outputs = fused(x_part)
        wholes = stock(x_whole)
        dys = [integers(*w.shape, seed=7 + i) for i, w in enumerate(wholes)]
        torch.autograd.backward(outputs, [part(dy, -2) for dy in dys])
    torch.autograd.backward(wholes, dys)
    assert [r.kind for r in log.started()] == [
        "all_gather_into_tensor",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ]
    for got, want in zip(outputs, wholes, strict=True):
        same(got, part(want, -2))
    same(x_part.grad, part(x_whole.grad, 1))
    for p in fused.fused_parts():
        got = p.view(getattr(fused, p.parameter).grad)
        same(got.flatten(0, 2), part(stock.get_parameter(p.saved).grad, 0))


@pytest.mark.parametrize("heads, kv_heads, bias", [(4, 4, False), (8, 2, False), (8, 4, True)])
def test_fused_qkv_is_three_linears(ranks, heads, kv_heads, bias):
    """Multi-head and grouped-query; one gather for the three."""
    ranks(2).run(qkv, heads, kv_heads, bias)


# --- SwiGLU


class StockFeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def build(fused: bool) -> tuple[nn.Module, StockFeedForward]:
    torch.manual_seed(7)
    stock = StockFeedForward(8, 12)
    torch.manual_seed(7)
    block = swiglu_feed_forward(8, 12, fused=fused, tp_group=dist.group.WORLD, tp_gemm_backend="collective")
    return block, stock


def part_like(name: str, whole: torch.Tensor) -> torch.Tensor:
    return part(whole, 1 if name.startswith("w2") else 0)


def swiglu(fused: bool, frozen: str | None) -> list[str]:
    block, stock = build(fused)
    # the type that was asked for, and, below, the collectives that were asked for
    assert type(block) is (FusedSwiGLU if fused else FeedForward)
    state, stock_state = block.state_dict(), stock.state_dict()
    assert sorted(state) == sorted(stock_state)
    for name, value in state.items():
        same(value, part_like(name, stock_state[name]))
    if frozen is not None:
        block.get_parameter(frozen).requires_grad_(False)
        stock.get_parameter(frozen).requires_grad_(False)
    x = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0))
    x_part, x_whole = part(x, 1).clone().requires_grad_(), x.clone().requires_grad_()
    with collective_log() as log:
        y = block(x_part)
        log.mark("backward")
        dy = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1))
        y.backward(part(dy, 1))
    y_whole = stock(x_whole)
    y_whole.backward(dy)
    # silu makes values that do not add exactly: sums over ranks and GEMMs of other shapes differ by fp32 roundoffs of
    # sums of at most 48 terms of magnitude about 1
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, part(y_whole, 1), **close)
    torch.testing.assert_close(x_part.grad, part(x_whole.grad, 1), **close)
    if isinstance(block, FusedSwiGLU):
        grads = {
            "w1.weight": block.w13.grad[:, 0],
            "w3.weight": block.w13.grad[:, 1],
            "w2.weight": block.w2.weight.grad,
        }
    else:
        grads = {name: p.grad for name, p in block.named_parameters()}
    for name, p in stock.named_parameters():
        assert (grads[name] is None) == (p.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(grads[name], part_like(name, p.grad), **close)
            # a gradient averaged over the ranks, or one branch's part of x's gradient, would be far outside
            assert float(p.grad.abs().median()) > 1e-3
    return [r.kind for r in log.records if r.event != "wait"]


GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.mark.parametrize("fused, frozen", [(False, None), (True, None), (False, "w3.weight"), (False, "w2.weight")])
def test_c74_swiglu_shares_one_gather(ranks, fused, frozen):
    """C74. Fused SwiGLU and collective GEMMs, both, whichever is asked for: 1 gather and 1 reduce-scatter forward.
    Backward: w2's gradient gathered, x gathered for the wgrads, x's gradient scattered; no more with a frozen branch.
    """
    for kinds in ranks(2).run(swiglu, fused, frozen):
        assert kinds == [GATHER, SCATTER, "backward", GATHER, GATHER, SCATTER]


def unused_up() -> list[str]:
    block, stock = build(False)
    x = integers(1, 8, 8, seed=0)
    x_part, x_whole = part(x, 1).clone().requires_grad_(), x.clone().requires_grad_()
    from gtp.ops import all_gather_linear_multi

    with collective_log() as log:
        weights = [block.w1.weight, block.w3.weight]
        gate, _ = all_gather_linear_multi(x_part, weights, backend=block.backend, sequence_dim=1)
        log.mark("backward")
        gate.sum().backward()
    stock.w1(x_whole).sum().backward()
    torch.testing.assert_close(x_part.grad, part(x_whole.grad, 1), rtol=1e-6, atol=1e-6)  # one addition over ranks
    same(block.w1.weight.grad, part(stock.w1.weight.grad, 0))
    assert block.w3.weight.grad is None
    return [r.kind for r in log.records if r.event != "wait"]


def test_c74_up_unused_in_the_loss(ranks):
    """C74. Its weight gets no gradient, and the gate's branch is right."""
    assert ranks(2).run(unused_up)[0] == [GATHER, "backward", GATHER, SCATTER]


# --- preconditions, at construction


def refusals() -> list[str]:
    group = dist.group.WORLD

    class NoBias(type(gemm_backend("collective", group))):
        name = "symm_mem"
        takes_bias = False

    no_bias = NoBias(group)
    other = gemm_backend("collective", dist.new_group([0, 1]))
    alone = [dist.new_group([rank]) for rank in range(2)]
    calls = [
        lambda: ColumnParallelLinear(8, 12, tp_group=group, sequence_parallel=False),
        lambda: RowParallelLinear(8, 12, tp_group=group, sequence_parallel=False),
        lambda: FeedForward(8, 12, tp_group=group, sequence_parallel=False),
        lambda: FusedSwiGLU(8, 12, tp_group=group, sequence_parallel=False),
        lambda: FusedQKVLinear(8, 4, tp_group=group, sequence_parallel=False),
        lambda: ColumnParallelLinear(8, 12, bias=True, tp_group=group, tp_gemm_backend=no_bias),
        lambda: FusedQKVLinear(8, 4, bias=True, tp_group=group, tp_gemm_backend=no_bias),
        lambda: ColumnParallelLinear(7, 12, tp_group=group),
        lambda: ColumnParallelLinear(8, 11, tp_group=group),
        lambda: RowParallelLinear(7, 12, tp_group=group),
        lambda: FeedForward(8, 11, tp_group=group),
        lambda: FusedSwiGLU(8, 0, tp_group=group),
        lambda: FusedQKVLinear(8, 4, 1, tp_group=group),
        lambda: FusedQKVLinear(8, 4, 3, tp_group=group),
        lambda: FusedQKVLinear(8, 4, 0, tp_group=group),
        lambda: FusedQKVLinear(8, 4, head_dim=0, tp_group=group),
        lambda: RowParallelLinear(8, 0, tp_group=group),
        lambda: FusedQKVLinear(10, 4, tp_group=group),
        lambda: ColumnParallelLinear(8, 12, tp_group=group, tp_gemm_backend="copy_engine", device="cpu"),
        lambda: FeedForward(8, 12, tp_group=group, tp_gemm_backend="symm_mem", device="cpu"),
        lambda: FeedForward(8, 12, tp_group=group, tp_gemm_backend="fastest"),
        lambda: FeedForward(8, 12, tp_group=group, tp_gemm_backend=other),
        # of one rank: nothing would be gathered
        lambda: FeedForward(8, 12, tp_group=group, tp_gemm_backend=gemm_backend("collective", None)),
        lambda: FeedForward(8, 12, tp_group=group, tp_gemm_backend=CollectiveBackend(alone[dist.get_rank()])),
    ]
    messages = []
    for call in calls:
        with pytest.raises(GTPValueError) as error:
            call()
        messages.append(str(error.value))
    # groups of one rank are alike, whatever their names: there is nothing to move
    one = gemm_backend("collective", None)
    assert gemm_backend(one, alone[dist.get_rank()]) is one
    assert gemm_backend(one, None) is one
    # a row-parallel bias is added after the sum over ranks: no GEMM has to take it
    assert RowParallelLinear(8, 12, bias=True, tp_group=group, tp_gemm_backend=no_bias).bias is not None
    return messages


def test_what_cannot_be_served_is_refused_when_built(ranks):
    messages = ranks(2).run(refusals, timeout=30)
    *same, alone = zip(*messages, strict=True)  # groups of one rank have names of their own
    assert [m.replace("rank 1 of", "rank 0 of") for _, m in same] == [m for m, _ in same]
    assert all("rank 0 of 1) belongs to another group" in m for m in alone)
    parts = [
        "ColumnParallelLinear(sequence_parallel=False)",
        "RowParallelLinear(sequence_parallel=False)",
        "FeedForward(sequence_parallel=False)",
        "FusedSwiGLU(sequence_parallel=False)",
        "FusedQKVLinear(sequence_parallel=False): its GEMMs gather and reduce-scatter activations",
        "ColumnParallelLinear(bias=True): tp_gemm_backend='symm_mem' takes no bias in the GEMM. Use bias=False",
        "FusedQKVLinear(bias=True)",
        "ColumnParallelLinear: in_features=7 must be a positive multiple of the 2 tensor-parallel ranks",
        "out_features=11",
        "RowParallelLinear: in_features=7",
        "FeedForward: hidden_dim=11",
        "FusedSwiGLU: hidden_dim=0",
        "num_kv_heads=1",
        "num_kv_heads=3 must divide num_heads=4",
        "num_kv_heads=0 must divide num_heads=4",
        "FusedQKVLinear: head_dim=0 must be at least 1",
        "RowParallelLinear: out_features=0 must be at least 1",
        "hidden_size=10 does not split into 4 heads: give head_dim",
        "tp_gemm_backend='copy_engine' cannot serve group",
        "tp_gemm_backend='symm_mem' cannot serve group",
        "must be one of 'auto', 'collective', 'symm_mem', 'copy_engine'",
        "belongs to another group than the module's",
        "SingleRankBackend(no group, rank 0 of 1) belongs to another group than the module's",
        "belongs to another group than the module's",
    ]
    for message, expected in zip(messages[0], parts, strict=True):
        assert expected in message


# --- one rank


def test_one_rank_runs_the_stock_path_and_says_so_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            block = FeedForward(8, 12, tp_gemm_backend="copy_engine")
    assert [str(w.message) for w in caught] == [
        "FeedForward: tp_gemm_backend='copy_engine' has nothing to do at tensor-parallel degree 1; "
        "the plain linear runs"
    ]
    assert caught[0].filename == __file__
    torch.manual_seed(7)
    stock = StockFeedForward(8, 12)
    block.load_state_dict(stock.state_dict())
    fused = FusedSwiGLU(8, 12)
    fused.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 8)  # odd lengths: nothing has to split
    with collective_log() as log:
        same(block(x), stock(x))
        torch.testing.assert_close(fused(x), stock(x), rtol=1e-6, atol=1e-6)  # one GEMM of other shape than two
    assert log.records == []


def test_one_rank_asked_for_auto_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ColumnParallelLinear(8, 12)
        FusedQKVLinear(8, 4, tp_gemm_backend="auto")


def shared_backend() -> None:
    backend = gemm_backend("collective", dist.group.WORLD)
    blocks = [FeedForward(8, 12, tp_group=dist.group.WORLD, tp_gemm_backend=backend) for _ in range(2)]
    held = {id(m.backend) for block in blocks for m in block.modules() if hasattr(m, "backend")}
    assert held == {id(backend)}
    # a copied module talks over the same group
    copied = copy.deepcopy(blocks[0])
    assert copied.backend is backend
    assert copied.w1.weight is not blocks[0].w1.weight
    same(copied.w1.weight, blocks[0].w1.weight)
    assert isinstance(backend, GemmBackend)
    assert repr(backend).startswith("CollectiveBackend(group ")


def test_modules_share_the_backend_they_are_given(ranks):
    ranks(2).run(shared_backend)


def test_meta_device():
    with torch.device("meta"):
        block = FusedSwiGLU(8, 12)
    assert block.w13.is_meta
    block = block.to_empty(device="cpu")
    torch.manual_seed(7)
    block.reset_parameters()
    block.w2.reset_parameters()
    torch.manual_seed(7)
    stock = StockFeedForward(8, 12)
    for name, value in block.state_dict().items():
        same(value, stock.state_dict()[name])

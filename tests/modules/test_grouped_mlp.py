"""`GroupedMLP` against a loop over plain linears: experts without tokens, padding, sharded weights (C80, C82, C84)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.modules import GroupedMLP
from gtp.ops import gather_sequence, reduce_scatter_sequence
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.memory import poisoned_memory
from gtp.testing.ranks import rank
from tests.modules.test_tensor_parallel_gtp import MarkGemms
from tests.reference import full_grad


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop(mlp: nn.Module, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
    """The experts one after the other, on plain weights. Nothing beyond the splits."""
    parts = []
    for e, rows in enumerate(x[: sum(splits)].split(splits)):
        hidden = F.linear(rows, getattr(mlp.fc1, f"weight{e}"))
        if callable(mlp.activation):
            hidden = mlp.activation(hidden)
        else:
            gate, up = hidden.chunk(2, -1)
            hidden = F.silu(gate) * up
        parts.append(F.linear(hidden, getattr(mlp.fc2, f"weight{e}")))
    return torch.cat(parts)


def build(experts: int, activation="swiglu") -> GroupedMLP:
    torch.manual_seed(3)
    return GroupedMLP(experts, 8, 12, activation=activation, init_method=lambda w: nn.init.normal_(w))


def accumulates(splits: list[int], main_grad: bool) -> None:
    """Two steps of two micro-batches each, sharded, poisoned memory; rank r's tokens are its own."""
    model, plain = build(4), build(4)
    gtp.shard_model(model, dist.group.WORLD)
    if main_grad:
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p.detach())
            p.grad_added_to_main_grad = False
    tokens = [[values(sum(splits), 8, seed=10 * micro + r) for r in range(2)] for micro in range(2)]
    with poisoned_memory(), late_collectives():
        for _ in range(2):
            for micro in range(2):
                y = model(tokens[micro][rank()], splits)
                assert torch.equal(y, loop(plain, tokens[micro][rank()], splits))
                y.square().sum().backward()
        for _ in range(2):
            for micro in range(2):
                for part in tokens[micro]:
                    loop(plain, part, splits).square().sum().div(2).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        got = p.main_grad if main_grad else p.grad
        if main_grad:
            p.grad = got
        got = full_grad(p)
        # four additions of fp32 values in an order of their own, per element
        torch.testing.assert_close(got, q.grad, rtol=1e-5, atol=1e-5 * float(q.grad.abs().max()), msg=name)
        if splits[int(name[-1])] == 0:
            assert torch.equal(got, torch.zeros_like(got)), name


@pytest.mark.parametrize("splits", [[5, 0, 3, 0], [0, 0, 0, 8]])
@pytest.mark.parametrize("main_grad", [False, True])
def test_c80_experts_without_tokens(ranks, splits, main_grad):
    ranks(2).run(accumulates, splits, main_grad)


def padded(experts: int, splits: list[int], junk: float) -> None:
    model, plain = build(experts), build(experts)
    gtp.shard_model(model, dist.group.WORLD)
    x = values(16, 8, seed=1)
    x[sum(splits) :] = junk
    x_plain = x.clone().requires_grad_()
    x.requires_grad_()
    y = model(x, splits)
    dy = values(16, 8, seed=2)
    dy[sum(splits) :] = junk
    y.backward(dy)
    want = loop(plain, x_plain, splits)
    want.backward(dy[: sum(splits)])
    assert torch.equal(y[: sum(splits)], want)
    assert torch.equal(y[sum(splits) :], torch.zeros(16 - sum(splits), 8))
    assert torch.equal(x.grad, torch.where(torch.arange(16)[:, None] < sum(splits), x_plain.grad, 0.0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full_grad(p), q.grad)  # both ranks saw the same tokens: the mean is the value


@pytest.mark.parametrize("experts, splits", [(1, [10]), (3, [4, 0, 6])])
@pytest.mark.parametrize("junk", [float("nan"), 1e30])
def test_c82_rows_beyond_the_splits(ranks, experts, splits, junk):
    ranks(2).run(padded, experts, splits, junk)


def other_activation() -> None:
    model = build(2, activation=F.gelu)
    x = values(5, 8, seed=1)
    assert torch.equal(model(x, [2, 3]), loop(model, x, [2, 3]))
    assert model.fc1.weight0.shape == (12, 8)


def test_a_function_as_activation():
    other_activation()
    with pytest.raises(gtp.GTPValueError, match="activation must be 'swiglu' or a function"):
        build(2, activation="relu2")
    with pytest.raises(gtp.GTPValueError, match="activation must be 'swiglu' or a function"):
        gtp.ops.grouped_mlp(values(5, 8, seed=1), [5], [values(4, 8, seed=2)], [values(8, 2, seed=3)], activation=None)


def split_gathers() -> list[str]:
    model = build(2)
    gtp.shard_model(model, dist.group.WORLD)
    x = values(6, 8, seed=1)
    for _ in range(2):
        model(x, [4, 2]).sum().backward()
    with collective_log() as log, MarkGemms(log):
        model(x, [4, 2])
    return [f"{r.event} {r.kind}" for r in log.records]


def test_fc2_is_gathered_under_fc1s_gemms(ranks):
    """Two experts: the gather of fc2 starts before fc1's GEMMs and is waited for after them."""
    events = ranks(2).run(split_gathers)[0]
    gathers = [i for i, e in enumerate(events) if e == "start all_gather_into_tensor"]
    waits = [i for i, e in enumerate(events) if e == "wait all_gather_into_tensor"]
    gemms = [i for i, e in enumerate(events) if e == "mark gemm"]
    assert len(gemms) == 4
    assert len(waits) == 4
    assert max(gathers) < gemms[0]
    assert gemms[1] < min(waits[2:]) < max(waits) < gemms[2]


class Experts(nn.Module):
    """Two experts of four, by rank; tokens of all ranks."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        whole = build(4)
        self.mlp = GroupedMLP(len(experts), 8, 12)
        with torch.no_grad():
            for i, e in enumerate(experts):
                getattr(self.mlp.fc1, f"weight{i}").copy_(getattr(whole.fc1, f"weight{e}"))
                getattr(self.mlp.fc2, f"weight{i}").copy_(getattr(whole.fc2, f"weight{e}"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert sees every token: no routing, so that only the boundary is under test."""
        experts = self.mlp.fc1.num_gemms
        y = self.mlp(x.repeat(experts, 1), [x.shape[0]] * experts)
        return y.view(experts, *x.shape).sum(0)


def boundary() -> None:
    x, dy = values(6, 8, seed=1), values(6, 8, seed=2)
    mine = x.chunk(2)[rank()].clone().requires_grad_()
    experts = Experts([2 * rank(), 2 * rank() + 1])
    with late_collectives():
        tokens = gather_sequence(mine, dist.group.WORLD, consumers="parts")
        y = reduce_scatter_sequence(experts(tokens), dist.group.WORLD)
        y.backward(dy.chunk(2)[rank()])
    whole = x.clone().requires_grad_()
    all_experts = Experts([0, 1, 2, 3])
    want = all_experts(whole)
    want.backward(dy)
    # one addition over ranks, in another order than the sum over four experts
    torch.testing.assert_close(y, want.chunk(2)[rank()], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2)[rank()], rtol=1e-5, atol=1e-3)
    for i in range(2):
        got, expected = getattr(experts.mlp.fc1, f"weight{i}"), getattr(all_experts.mlp.fc1, f"weight{2 * rank() + i}")
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-3)
    # what a backward that only slices would give: this rank's experts' part
    alone = x.clone().requires_grad_()
    experts(alone).backward(dy)
    assert float((alone.grad - whole.grad).abs().median()) > 1.0


def test_c84_gradients_at_the_boundary_of_a_mixture(ranks):
    ranks(2).run(boundary)

"""The edges of a sequence-parallel region, forward and backward, with integers: every sum is exact."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gtp.errors import GTPValueError, UnsupportedError
from gtp.modules import sum_gradients_over_tp
from gtp.ops import gather_sequence, reduce_scatter_sequence, split_sequence
from gtp.testing.fakes import FakeDistributedWeight
from gtp.testing.ranks import rank, world_size


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def mine(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.chunk(world_size(), dim)[rank()]


def edges(dim: int) -> None:
    group = dist.group.WORLD
    shape = (8, 3, 5) if dim == 0 else (3, 8, 5)
    whole, dy = integers(*shape, seed=0), integers(*shape, seed=1)
    ranks_values = [integers(*shape, seed=10 + r) for r in range(world_size())]

    x = whole.clone().requires_grad_()
    y = split_sequence(x, group, sequence_dim=dim)
    y.backward(mine(dy, dim))
    assert torch.equal(y, mine(whole, dim))
    assert torch.equal(x.grad, dy)

    x = mine(whole, dim).clone().requires_grad_()
    y = gather_sequence(x, group, sequence_dim=dim, consumers="same")
    y.backward(dy)
    assert torch.equal(y, whole)
    assert torch.equal(x.grad, mine(dy, dim))

    x = mine(whole, dim).clone().requires_grad_()
    y = gather_sequence(x, group, sequence_dim=dim, consumers="parts")
    y.backward(ranks_values[rank()])
    assert torch.equal(y, whole)
    assert torch.equal(x.grad, mine(sum(ranks_values), dim))

    x = ranks_values[rank()].clone().requires_grad_()
    y = reduce_scatter_sequence(x, group, sequence_dim=dim)
    y.backward(mine(dy, dim))
    assert torch.equal(y, mine(sum(ranks_values), dim))
    assert torch.equal(x.grad, dy)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_values_and_gradients(ranks, world, dim):
    ranks(world).run(edges, dim)


def penalty() -> None:
    """`w2 tanh(w1 x)` over the parts of a sequence, and the square of its input's gradient, against one process."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((8, 6), (12, 6), (6, 12)))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().sum() + dx.square().sum()

    whole = [t.clone().requires_grad_() for t in (x, w1, w2)]
    loss(whole[0], torch.tanh(whole[0] @ whole[1].t()) @ whole[2].t()).backward()

    parts = [mine(x, 0), mine(w1, 0), mine(w2, 1)]
    part = [t.clone().requires_grad_() for t in parts]
    hidden = torch.tanh(gather_sequence(part[0], group, consumers="parts") @ part[1].t())
    loss(part[0], reduce_scatter_sequence(hidden @ part[2].t(), group)).backward()
    for t, wanted in zip(part, [mine(whole[0].grad, 0), mine(whole[1].grad, 0), mine(whole[2].grad, 1)], strict=True):
        # sums over ranks are added in another order than one product's: a few fp64 roundoffs
        torch.testing.assert_close(t.grad, wanted, rtol=1e-12, atol=1e-12)

    # a part of something whole, and whole again: every rank computes the same from it
    same = x.clone().requires_grad_()
    again = gather_sequence(split_sequence(same, group).square(), group, consumers="same")
    loss(same, again).backward()
    expected = x.clone().requires_grad_()
    loss(expected, expected.square()).backward()
    assert torch.equal(same.grad, expected.grad)


@pytest.mark.parametrize("world", [2, 4])
def test_c54_second_derivatives(ranks, world):
    """C54. A gradient penalty across the edges equals that of one process."""
    ranks(world).run(penalty)


def refused() -> list[str]:
    group = dist.group.WORLD
    calls = [
        lambda: split_sequence(torch.ones(7, 4), group),
        lambda: reduce_scatter_sequence(torch.ones(2, 7, 4), group, sequence_dim=1),
        lambda: gather_sequence(torch.ones(4, 4), group, sequence_dim=1, consumers="same"),
        lambda: gather_sequence(torch.ones(4, 4), group, consumers="all"),
        lambda: split_sequence(torch.ones(4, 4), "tp"),
        lambda: sum_gradients_over_tp([FakeDistributedWeight(torch.ones(2, 2), label="norm.weight")], group),
    ]
    messages = []
    for call in calls:
        with pytest.raises(GTPValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_wrong_use(ranks):
    parts = [
        "split_sequence: a sequence of 7 (dim 0 of x (7, 4)) does not split over 2 ranks",
        "reduce_scatter_sequence: a sequence of 7 (dim 1",
        "is the last dim of x",
        "consumers must be 'same' or 'parts', got 'all'",
        "must be a ProcessGroup or a 1-d DeviceMesh, got str",
        "norm.weight",
    ]
    for message, part in zip(ranks(2).run(refused)[0], parts, strict=True):
        assert part in message


def summed() -> None:
    group = dist.group.WORLD
    weight, frozen = torch.ones(4, requires_grad=True), torch.ones(4)
    handles = sum_gradients_over_tp([weight, frozen], group)
    for step in range(2):  # accumulation: each backward's part is summed once
        (weight * float(rank() + 1 + step)).sum().backward()
    total = sum(r + 1.0 + step for r in range(2) for step in range(2))
    assert torch.equal(weight.grad, torch.full((4,), total))
    for handle in handles:
        handle.remove()
    weight.grad = None
    (weight * float(rank() + 1)).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), float(rank() + 1)))
    assert sum_gradients_over_tp([weight], None) == []


def test_gradients_are_summed_over_tp(ranks):
    ranks(2).run(summed)


def sharded_afterwards() -> None:
    from torch import nn

    import gtp

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    sum_gradients_over_tp(model[0].parameters(), dist.group.WORLD)
    with pytest.raises(UnsupportedError, match="given to sum_gradients_over_tp is left out there"):
        gtp.shard_model(model, dist.group.WORLD)
    gtp.shard_model(model, dist.group.WORLD, exclude=["0.weight"])


def test_a_weight_that_is_sharded_afterwards_is_an_error(ranks):
    ranks(2).run(sharded_afterwards)

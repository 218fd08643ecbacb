"""torch.compile and the ops: plain weights are traced; at a distributed weight the graph breaks, and nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from gtp.ops import embedding, grouped_linear, layernorm_linear, linear
from gtp.testing.fakes import FakeDistributedWeight
from tests.compiling import fresh_compiler
from tests.ops.managed import exact_fake, plain_weight

Weights = list[torch.Tensor]


def model(x: torch.Tensor, ids: torch.Tensor, weights: Weights) -> torch.Tensor:
    """All ops, with something to compile between them. x `[6, 4]`."""
    table, up, down, *experts = weights
    h = x + embedding(ids, table)
    h = F.gelu(linear(h, up)) * 2
    h = layernorm_linear(h, torch.ones(8), None, down).tanh()
    return grouped_linear(h, [2, 0, 3], experts)


def problem(make: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    torch.manual_seed(0)
    single = [make(torch.randn(*shape)) for shape in [(10, 4), (8, 4), (4, 8)]]
    fulls = [torch.randn(5, 4) for _ in range(3)]
    if isinstance(single[0], FakeDistributedWeight):
        scales = {"scale_forward": 1, "scale_backward": 1, "scale_finalize": 1}
        return [*single, *FakeDistributedWeight.make_group(fulls, mode=single[0].fake.mode, **scales)]
    return [*single, *[make(full) for full in fulls]]


def megatron_weight(full: torch.Tensor) -> torch.nn.Parameter:
    weight = plain_weight(full)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(full), False
    return weight


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": plain_weight,
    "ready": exact_fake,
    "deferred": lambda full: exact_fake(full, mode="deferred"),
    "main_grad": lambda full: exact_fake(full, mode="main_grad"),
    "megatron": megatron_weight,
}


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("kind", MAKERS)
def test_compiled_is_eager_and_settles(kind: str) -> None:
    weights, twins = problem(MAKERS[kind]), problem(MAKERS[kind])
    compiled = torch.compile(model, backend="aot_eager")
    ids = torch.tensor([1, 2, 3, 3, 0, 9])
    graphs = []
    for step in range(4):
        x = torch.randn(6, 4)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [compiled(inputs[0], ids, weights), model(inputs[1], ids, twins)]
        for y in outputs:
            y.square().sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert torch.equal(*outputs), step
        assert torch.equal(*(i.grad for i in inputs)), step
    assert graphs[1:] == [graphs[1]] * 3, "it recompiles after the second step"
    for weight, twin in zip(weights, twins, strict=True):
        name = "main_grad" if kind in ("main_grad", "megatron") else "grad"
        assert torch.equal(getattr(weight, name), getattr(twin, name))


def test_plain_weights_are_one_graph() -> None:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, ids, weights = torch.randn(6, 4), torch.tensor([1, 2, 3, 3, 0, 9]), problem(plain_weight)
    assert torch.equal(compiled(x, ids, weights), model(x, ids, weights))


def test_full_graphs_over_a_distributed_weight_are_refused_clearly() -> None:
    weight = exact_fake(torch.randn(3, 4))
    compiled = torch.compile(lambda x: linear(x, weight), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear"):
        compiled(torch.randn(2, 4))
    assert weight.methods == []

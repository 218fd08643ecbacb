"""`GroupedLinear`: one linear per expert. What the op does with splits: tests/ops/test_grouped_linear.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from gtp.modules import GroupedLinear
from gtp.testing.fakes import FakeDistributedWeight


def test_it_is_a_loop_of_linears() -> None:
    torch.manual_seed(0)
    module, x = GroupedLinear(3, 6, 5), torch.randn(10, 6)
    for i in range(3):
        torch.nn.init.normal_(getattr(module, f"bias{i}"))
    y = module(x, [4, 0, 5])
    assert torch.equal(y[:4], F.linear(x[:4], module.weight0, module.bias0))
    assert torch.equal(y[4:9], F.linear(x[4:9], module.weight2, module.bias2))
    assert torch.equal(y[9:], torch.zeros(1, 5))


@pytest.mark.parametrize("experts", [1, 3])
def test_distributed_weights_train_as_plain_ones(experts: int) -> None:
    torch.manual_seed(0)
    plain = GroupedLinear(experts, 6, 5)
    module = copy.deepcopy(plain)
    fulls = [p.detach() for n, p in plain.named_parameters() if n.startswith("weight")]
    group = FakeDistributedWeight.make_group(fulls, scale_forward=1, scale_backward=1, scale_finalize=1)
    for i, weight in enumerate(group):
        setattr(module, f"weight{i}", weight)
    splits = [10] if experts == 1 else [7, 0, 3]
    x = torch.randn(10, 6)
    for m in (plain, module):
        m(x, splits).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert group[0].methods.count("finalize_group_grads") == 1

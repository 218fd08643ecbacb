"""The scale of expert gradients, on every way by which a gradient reaches a weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.megatron.weight import MegatronGTPWeight


def _by_gemm_and_by_full_tensor() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    gtp.shard_model(model, dist.group.WORLD)
    weight = model[0].weight
    weight.__class__ = MegatronGTPWeight
    weight.gradient_scale = 0.5
    x = torch.arange(8.0).view(2, 4)
    F.linear(x, weight).sum().backward()
    by_gemm, weight.grad = weight.grad, None
    (x @ weight.full_tensor().t()).sum().backward()
    assert torch.equal(weight.grad, by_gemm)
    assert torch.equal(by_gemm, 0.5 * x.sum(0).expand(2, 4))

    weight.grad = None
    other = torch.zeros(4, 4, requires_grad=True)
    upstream = torch.ones(4, 4)
    (weight.full_tensor() + other).backward(upstream)
    assert torch.equal(weight.grad, torch.full((2, 4), 0.5))
    assert torch.equal(upstream, torch.ones(4, 4))
    assert torch.equal(other.grad, torch.ones(4, 4))


def test_a_gradient_through_full_tensor_is_scaled_and_others_are_not(ranks: Any) -> None:
    ranks(2).run(_by_gemm_and_by_full_tensor)

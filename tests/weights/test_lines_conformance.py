"""GTPWeight is an implementer like any other: the conformance suite, alone and on ranks whose rows do not divide."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.modules import GroupedLinear
from gtp.testing.conformance import DistributedWeightConformance


class GTPWeightConformance(DistributedWeightConformance):
    """Each weight is a model of its own. All ranks compute the same, so the mean over two of them is what one has."""

    __test__ = False
    rows = 11
    config = gtp.GTPConfig()

    def make_weight(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        model = nn.Linear(full.shape[1], full.shape[0], bias=False)
        return self._shard(model, {"weight": full}, requires_grad)[0]

    def make_group(self, fulls: Sequence[torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
        rows, features = fulls[0].shape
        model = GroupedLinear(len(fulls), features, rows, bias=False)
        return self._shard(model, {f"weight{i}": full for i, full in enumerate(fulls)}, requires_grad)

    def _shard(self, model: nn.Module, fulls: dict[str, torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
        model.to(self.dtype).load_state_dict(fulls)
        model.requires_grad_(requires_grad)
        gtp.shard_model(model, dist.group.WORLD, config=self.config)
        assert all(isinstance(p, gtp.GTPWeight) for p in model.parameters())
        return list(model.parameters())

    def expected_gradient(self, wgrad: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size()
        layout = gtp.ShardLayout(tuple(wgrad.shape), size, dist.get_rank(), self.config.alignment)
        shard = torch.zeros(layout.shard_shape, dtype=wgrad.dtype)
        shard[layout.valid_slice] = wgrad[layout.shard_slice]
        return shard

    def gradient_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        return None if weight.grad is None else weight.grad.detach().as_subclass(torch.Tensor)


class InMainGrad(GTPWeightConformance):
    """A weight that somebody gave a `main_grad`, as Megatron does: the gradient goes there, and `.grad` stays None."""

    def _shard(self, model: nn.Module, fulls: dict[str, torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
        weights = super()._shard(model, fulls, requires_grad)
        for weight in weights:
            weight.main_grad = torch.zeros(weight.layout.shard_shape)
            weight.grad_added_to_main_grad = False
        return weights

    def gradient_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        assert weight.grad is None
        return weight.main_grad if weight.grad_added_to_main_grad else None


class Bfloat16(GTPWeightConformance):
    dtype = torch.bfloat16


class Aligned(GTPWeightConformance):
    """The second of two ranks has padding only."""

    config = gtp.GTPConfig(alignment=16, keep_bytes=1 << 20)


SUITES = {suite.__name__: suite for suite in (GTPWeightConformance, InMainGrad, Bfloat16, Aligned)}


def _run(name):
    return SUITES[name]().run()


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_sharded_weight_keeps_the_contract(ranks, size, name):
    for ran in ranks(size).run(_run, name):
        assert ran == DistributedWeightConformance.all_tests()

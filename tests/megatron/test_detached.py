"""Output layers that are handed a weight: detached, which trains their input and not the weight; or another one's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import gtp
from gtp.megatron.tied import accept_supplied_weight
from gtp.testing.memory import live_full_storages
from tests.megatron import training
from tests.megatron.models import model_config
from tests.megatron.test_parity import NORM, ORDER
from tests.megatron.training import Case, Trained, environment, train
from tests.weights.side_by_side import settled


def trained(case: Case) -> Trained:
    """With `mtp_detach_heads`: MTP's losses train its layers, and neither the model nor the output layer."""

    def detaching(case: Case) -> Any:
        config = model_config(case)
        config.mtp_detach_heads = True
        return config

    with mock.patch.object(training, "model_config", detaching):
        return train(case)


@pytest.mark.parametrize("tied", [False, True])
def test_mtp_with_detached_heads_trains_as_without_the_flag(ranks: Any, tied: bool):
    case = Case(gtp=2, mtp=2, tied=tied, layers=1, steps=2)
    attached = ranks(2).run(train, case)
    pairs = zip(ranks(2).run(trained, case.unsharded()), ranks(2).run(trained, case), attached, strict=True)
    for plain, sharded, trains_heads in pairs:
        assert "output_layer.weight" in sharded.sharded or tied
        assert sharded.losses == pytest.approx(plain.losses, rel=0, abs=ORDER)
        assert sharded.norms == pytest.approx(plain.norms, rel=2 * NORM)
        assert abs(sharded.norms[0] - trains_heads.norms[0]) > 1e-3


def full_weights() -> int:
    return sum((10, 8) in storage.shapes for storage in live_full_storages(1))


def one_layer() -> dict[str, Any]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    case = Case(gtp=2, alignment=4)
    with environment(case):
        options = {"config": model_config(case), "init_method": torch.nn.init.normal_, "bias": False}
        torch.manual_seed(3)
        layer, other = (ColumnParallelLinear(8, 10, **options) for _ in range(2))
        accept_supplied_weight(layer)
        full, others = layer.weight.full_tensor().detach(), other.weight.full_tensor().detach()
        x = torch.ones(3, 8, requires_grad=True)
        y, _ = layer(x, layer.weight.detach())
        waiting = settled(full_weights, lambda found: found == 2)
        y.sum().backward()
        untrained = layer.weight.grad is None
        of_other, _ = layer(x, weight=other.weight)
        own, _ = layer(x)
        own.sum().backward()
        with pytest.raises(RuntimeError) as part:
            layer(x, weight=layer.weight.detach()[:3])
        layer(x, weight=layer.weight.detach())
        with torch.no_grad():
            late, _ = layer(x, weight=layer.weight.detach())
            layer.weight.mul_(1)
        return {
            "outputs": [y.detach(), of_other.detach(), own.detach(), late],
            "expected": [torch.ones(3, 8) @ w.t() for w in (full, others, full, full)],
            "dgrad": (x.grad, 2 * full.sum(0).expand(3, 8)),
            "waiting": waiting,
            "trained": (untrained, layer.weight.grad is not None, other.weight.grad is None),
            "part": str(part.value),
        }


def test_a_detached_weight_is_gathered_again_in_backward_and_gets_no_gradient(ranks: Any):
    """And a layer that was handed another's weight has its own one again."""
    for found in ranks(2).run(one_layer):
        for output, expected in zip(found["outputs"], found["expected"], strict=True):
            assert torch.equal(output, expected)
        torch.testing.assert_close(*found["dgrad"])
        assert found["waiting"] == 2  # the test's own two
        assert found["trained"] == (True, True, True)
        assert "supplied weight's shape is (3, 8), not (10, 8)" in found["part"]


def changed_between() -> str:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    with environment(Case(gtp=2)):
        layer = ColumnParallelLinear(
            8, 10, config=model_config(Case(gtp=2)), init_method=torch.nn.init.normal_, bias=False
        )
        accept_supplied_weight(layer)
        y, _ = layer(torch.ones(3, 8, requires_grad=True), weight=layer.weight.detach())
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(gtp.GTPStateError) as error:
            y.sum().backward()
    return str(error.value)


def test_a_detached_weight_that_changes_before_backward_is_refused(ranks: Any):
    for text in ranks(2).run(changed_between):
        assert "changed in place between its forward and" in text

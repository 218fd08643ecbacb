"""The fakes tell the truth about what they were asked, and complain about what is not in the contract."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gtp.errors import GTPValueError, ProtocolError
from gtp.ops import linear
from gtp.protocol import materialize_weight_for_forward
from gtp.testing.fakes import VIOLATIONS, Call, FakeDistributedWeight, Mode, Violation, violating_weight
from tests.processes import Ended

FULL = torch.arange(12.0).reshape(4, 3)


def test_it_is_a_parameter_that_modules_and_optimizers_take() -> None:
    module = nn.Linear(3, 4)
    module.weight = FakeDistributedWeight(FULL, rows=(1, 3))
    assert dict(module.named_parameters())["weight"] is module.weight
    optimizer = torch.optim.SGD([module.weight], lr=0.5)
    module.weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert torch.equal(module.weight.detach(), FULL[1:3] - 0.5)


def test_one_product_tells_the_whole_route() -> None:
    weight = FakeDistributedWeight(FULL, rows=(0, 2))
    x = torch.ones(1, 3, requires_grad=True)
    y = linear(x, weight)
    y.sum().backward()
    assert torch.equal(y, 2 * FULL.sum(1, keepdim=True).t())
    assert torch.equal(x.grad, 3 * FULL.sum(0, keepdim=True))
    assert torch.equal(weight.grad, torch.full((2, 3), 5.0))


@pytest.mark.parametrize("mode", ["ready", "deferred", "main_grad"])
def test_each_mode_delivers_its_way(mode: Mode) -> None:
    weight = FakeDistributedWeight(FULL, mode=mode, rows=(2, 4))
    for backward in (1, 2):
        linear(torch.ones(1, 3), weight).sum().backward()
        expected = torch.full((2, 3), 5.0 * backward)
        if mode == "main_grad":
            assert weight.grad_added_to_main_grad
            assert torch.equal(weight.main_grad, expected)
            assert weight.grad.isnan().all(), "the placeholder must be of no use to anybody"
        else:
            assert torch.equal(weight.grad, expected)


def test_calls_are_recorded_with_keyword_arguments_that_callers_add() -> None:
    weight = FakeDistributedWeight(FULL)
    weight.materialize_group_for_forward(nvtx_label="up")
    weight.materialize_group_for_backward(nvtx_label="up", depth=2)
    buffer = weight.grad_buffer(nvtx_label="up")
    weight.finalize_group_grads(buffer, nvtx_label="down")
    weight.finalize_group_grads(torch.zeros(4, 3))
    assert weight.calls == [
        Call("materialize_group_for_forward", {"nvtx_label": "up"}),
        Call("materialize_group_for_backward", {"nvtx_label": "up", "depth": 2}),
        Call("grad_buffer", {"nvtx_label": "up"}),
        Call("finalize_group_grads", {"nvtx_label": "down"}, (True,)),
        Call("finalize_group_grads", {}, (False,)),
    ]


@pytest.mark.parametrize(
    "name", ["main_grad", "handle", "logical_shape", "full_tensor", "group", "overwrite_main_grad"]
)
def test_reading_a_foreign_attribute_is_loud_even_with_a_default(name: str) -> None:
    weight = FakeDistributedWeight(FULL, label="up.weight")
    with pytest.raises(ProtocolError, match=f"up.weight: '{name}' was read on a distributed weight"):
        getattr(weight, name, None)
    with pytest.raises(ProtocolError, match="not in the contract"):
        hasattr(weight, name)


def test_the_contracts_optional_flag_may_be_asked_for() -> None:
    assert not getattr(FakeDistributedWeight(FULL), "grad_added_to_main_grad", False)
    assert FakeDistributedWeight(FULL, mode="main_grad").grad_added_to_main_grad is False


def test_undefined_memory_is_nan() -> None:
    assert FakeDistributedWeight(FULL).grad_buffer().isnan().all()


def test_a_held_full_weight_is_seen() -> None:
    weight = FakeDistributedWeight(FULL)
    (full,) = materialize_weight_for_forward([weight])
    assert weight.live_full_weights == 1
    y = torch.nn.functional.linear(torch.ones(2, 3, requires_grad=True), full)  # autograd holds it
    del full
    assert weight.live_full_weights == 1
    del y
    assert weight.live_full_weights == 0


def test_a_follower_that_is_asked_is_loud() -> None:
    group = FakeDistributedWeight.make_group([FULL, FULL])
    with pytest.raises(
        ProtocolError, match="fake1: materialize_group_for_forward was asked of a weight that does not lead"
    ):
        group[1].materialize_group_for_forward()


def test_a_wgrad_of_the_wrong_form_is_loud() -> None:
    with pytest.raises(ProtocolError, match=r"finalize takes a wgrad \(4, 3\), got \(2, 3\)"):
        FakeDistributedWeight(FULL).finalize_group_grads(FULL[:2])
    with pytest.raises(ProtocolError, match="bare wgrad for one weight, a list for several"):
        FakeDistributedWeight(FULL).finalize_group_grads([FULL])


def test_a_wrong_mode_and_a_copy_are_refused() -> None:
    with pytest.raises(GTPValueError, match="mode must be 'ready', 'deferred' or 'main_grad', got 'eager'"):
        FakeDistributedWeight(FULL, mode="eager")  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="is not copied"):
        copy.deepcopy(FakeDistributedWeight(FULL))


@pytest.mark.parametrize("rows", [(1, 5), (-2, 4), (3, 1)])
def test_rows_that_are_not_there_are_refused(rows: tuple[int, int]) -> None:
    with pytest.raises(GTPValueError, match=r"rows must be \(start, stop\) within 0 and 4"):
        FakeDistributedWeight(FULL, rows=rows)


def test_a_rule_that_is_none_is_refused() -> None:
    """A misspelt violation would make a fake that keeps the contract, and a test that cannot fail."""
    with pytest.raises(GTPValueError, match="violation must be one of"):
        violating_weight(FULL, Violation("grad_buffer", "count"))


def test_repr_says_what_it_is() -> None:
    weight = FakeDistributedWeight(FULL, rows=(1, 3), label="up.weight")
    assert repr(weight) == "FakeDistributedWeight('up.weight', rows 1:3 of (4, 3), ready)"


def test_there_is_a_violation_for_every_method() -> None:
    assert {v.method for v in VIOLATIONS} == {
        "materialize_group_for_forward",
        "materialize_group_for_backward",
        "grad_buffer",
        "finalize_group_grads",
    }


@pytest.mark.process("-c", "import sys, gtp.testing.fakes, gtp.testing.conformance; print('pytest' in sys.modules)")
def test_importing_the_testing_tools_needs_no_pytest(process: Ended) -> None:
    assert process.stdout.strip() == "False"

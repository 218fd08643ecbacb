"""The dispatchers: who is asked, what is passed on, what is refused. Fakes in one process, no GEMM.

One test: `pytest tests/protocol/test_dispatch.py -k leader`.
"""

from __future__ import annotations

import pytest
import torch

from gtp.errors import GTPError, ProtocolError
from gtp.protocol import (
    Outcome,
    describe_weight,
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    outcome_of,
    weight_grad_buffers,
)
from gtp.testing.fakes import VIOLATIONS, FakeDistributedWeight, Violation, violating_weight

FULL = torch.arange(12.0).reshape(4, 3)


def test_plain_tensors_pass_through_untouched() -> None:
    weights = [torch.ones(2, 3), torch.nn.Parameter(torch.ones(2, 3))]
    assert [a is b for a, b in zip(materialize_weight_for_forward(weights), weights, strict=True)] == [True, True]
    assert [a is b for a, b in zip(materialize_weight_for_backward(weights), weights, strict=True)] == [True, True]
    assert weight_grad_buffers(weights) is None
    wgrads = [torch.zeros(2, 3), torch.ones(2, 3)]
    assert [a is b for a, b in zip(finalize_weight_grads(weights, wgrads), wgrads, strict=True)] == [True, True]


def test_a_group_of_one_speaks_bare_tensors() -> None:
    weight = FakeDistributedWeight(FULL, rows=(1, 3))
    assert torch.equal(materialize_weight_for_forward([weight])[0], 2 * FULL)
    assert torch.equal(materialize_weight_for_backward([weight])[0], 3 * FULL)
    (grad,) = finalize_weight_grads([weight], [FULL])
    assert torch.equal(grad, 5 * FULL[1:3])
    assert weight.methods == [
        "materialize_group_for_forward",
        "materialize_group_for_backward",
        "finalize_group_grads",
    ]


def test_only_the_leader_is_asked() -> None:
    group = FakeDistributedWeight.make_group([FULL, FULL + 1, FULL + 2], rows=(0, 2))
    for i, full in enumerate(materialize_weight_for_forward(group)):
        assert torch.equal(full, 2 * (FULL + i))
    for i, full in enumerate(materialize_weight_for_backward(group)):
        assert torch.equal(full, 3 * (FULL + i))
    for i, grad in enumerate(finalize_weight_grads(group, [FULL * i for i in range(3)])):
        assert torch.equal(grad, 5 * i * FULL[:2])
    assert [weight.methods for weight in group[1:]] == [[], []]


def test_every_weight_is_asked_for_its_buffer() -> None:
    group = FakeDistributedWeight.make_group([FULL, FULL + 1], rows=(0, 2))
    buffers = weight_grad_buffers(group)
    assert [b.shape for b in buffers] == [(4, 3), (4, 3)]
    assert buffers[0].data_ptr() != buffers[1].data_ptr()


@pytest.mark.parametrize(
    "mode, outcome", [("ready", Outcome.READY), ("deferred", Outcome.DEFERRED), ("main_grad", Outcome.IN_MAIN_GRAD)]
)
def test_the_outcome_has_a_name(mode: str, outcome: Outcome) -> None:
    weight = FakeDistributedWeight(FULL, mode=mode)
    (grad,) = finalize_weight_grads([weight], [FULL])
    assert outcome_of(weight, grad) is outcome


def test_outcomes_are_three() -> None:
    assert [o.value for o in Outcome] == ["ready", "deferred", "in_main_grad"]


def test_the_flag_on_something_else_than_a_tensor_is_a_type_error() -> None:
    class NotATensor:
        is_distributed_weight = True

    with pytest.raises(TypeError, match="NotATensor sets is_distributed_weight but is not a torch") as caught:
        is_distributed_weight(NotATensor())
    assert isinstance(caught.value, GTPError)


def test_a_class_is_no_weight() -> None:
    with pytest.raises(ProtocolError, match=r"FakeDistributedWeight is a class .* one of its instances"):
        is_distributed_weight(FakeDistributedWeight)


DISPATCHERS = {
    "materialize_group_for_forward": materialize_weight_for_forward,
    "materialize_group_for_backward": materialize_weight_for_backward,
    "grad_buffer": weight_grad_buffers,
    "finalize_group_grads": lambda weights: finalize_weight_grads(weights, [FULL]),
}


@pytest.mark.parametrize("method", DISPATCHERS)
def test_a_weight_without_a_method_is_told_which(method: str) -> None:
    kinds = {name: lambda self: None for name in DISPATCHERS if name != method}
    weight = torch.ones(2, 3).as_subclass(type("Half", (torch.Tensor,), {"is_distributed_weight": True, **kinds}))
    with pytest.raises(ProtocolError, match=rf"weight \(Half, shard \(2, 3\)\) .* has no {method}; a Distributed"):
        DISPATCHERS[method]([weight])


@pytest.mark.parametrize("method", DISPATCHERS)
def test_an_implementers_own_mistake_is_not_taken_for_a_missing_method(method: str) -> None:
    def mistaken(self: torch.Tensor, *args: object) -> None:
        raise AttributeError("no such thing")

    methods = dict.fromkeys(DISPATCHERS, mistaken)
    weight = torch.ones(2, 3).as_subclass(type("Whole", (torch.Tensor,), {"is_distributed_weight": True, **methods}))
    with pytest.raises(AttributeError, match="no such thing"):
        DISPATCHERS[method]([weight])


@pytest.mark.parametrize("weight", [FULL, FakeDistributedWeight(FULL)])
@pytest.mark.parametrize("method", DISPATCHERS)
def test_a_weight_that_is_in_no_list_is_not_taken_apart(method: str, weight: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match=r"a list of weights was expected, and weight .*write \[weight\]"):
        DISPATCHERS[method](weight)


@pytest.mark.parametrize("thing", [None, 3, torch.ones(2), torch.nn.Parameter(torch.ones(2)), object()])
def test_what_does_not_say_so_is_not_distributed(thing: object) -> None:
    assert not is_distributed_weight(thing)


def test_a_false_flag_is_not_distributed() -> None:
    weight = torch.ones(2, 3)
    weight.is_distributed_weight = False
    assert not is_distributed_weight(weight)


def test_an_instance_flag_counts() -> None:
    weight = torch.ones(2, 3)
    weight.is_distributed_weight = True
    assert is_distributed_weight(weight)


def ask(weight: torch.Tensor) -> None:
    materialize_weight_for_forward([weight])
    materialize_weight_for_backward([weight])
    weight_grad_buffers([weight])
    finalize_weight_grads([weight], [FULL])


PROMISE_AND_ARRIVAL = {
    ("materialize", "count"): r"promised one full weight per weight \(1\), got 2",
    ("materialize", "type"): r"must return a torch.Tensor, got str",
    ("materialize", "shape"): r"promised \[rows, 3\], got \(4, 2\)",
    ("materialize", "strides"): r"must be contiguous, got strides \(1, 4\)",
    ("materialize", "distributed"): r"returned a FakeDistributedWeight that is distributed itself; .* plain tensor",
    ("grad_buffer", "type"): r"must return a torch.Tensor, got str",
    ("grad_buffer", "shape"): r"promised \[rows, 3\], got \(4, 2\)",
    ("grad_buffer", "strides"): r"must be contiguous, got strides \(1, 4\)",
    ("finalize", "count"): r"promised one outcome per weight \(1\), got 2",
    ("finalize", "type"): r"must return a tensor of the shard's shape or None, got str",
    ("finalize", "shape"): r"promised the shard's shape \(2, 3\), got \(2, 2\)",
    ("finalize", "rows"): r"promised the shard's shape \(2, 3\), got \(1, 3\)",
}

# The dispatchers do not know how many rows a full weight has; the ops do, see tests/ops/test_linear.py.
OF_DISPATCHERS = [v for v in VIOLATIONS if v.kind != "rows" or v.method == "finalize_group_grads"]


@pytest.mark.parametrize("violation", OF_DISPATCHERS, ids=lambda v: f"{v.method}-{v.kind}")
def test_a_broken_rule_is_named_with_promise_and_arrival(violation: Violation) -> None:
    weight = violating_weight(FULL, violation, rows=(0, 2), label="blocks.3.up.weight")
    kind = next(k for k in ("materialize", "grad_buffer", "finalize") if violation.method.startswith(k))
    with pytest.raises(ProtocolError, match=PROMISE_AND_ARRIVAL[kind, violation.kind]) as caught:
        ask(weight)
    assert str(caught.value).startswith(f"{violation.method} of weight 'blocks.3.up.weight'")
    assert "shard (2, 3)" in str(caught.value)


def test_a_group_that_answers_for_too_few_is_named() -> None:
    class OneForAll(FakeDistributedWeight):
        def finalize_group_grads(self, wgrads: object, **options: object) -> None:
            return None

    group = OneForAll.make_group([FULL, FULL])
    with pytest.raises(ProtocolError, match=r"promised one outcome per weight \(2\), got 1"):
        finalize_weight_grads(group, [FULL, FULL])


def test_a_caller_with_too_few_wgrads_is_told() -> None:
    group = FakeDistributedWeight.make_group([FULL, FULL])
    with pytest.raises(ProtocolError, match="got 1 wgrads for 2 weights led by weight 'fake0'"):
        finalize_weight_grads(group, [FULL])


def test_a_weight_without_a_name_is_described_by_class_and_shape() -> None:
    assert describe_weight(torch.nn.Parameter(torch.ones(2, 3))) == "weight (Parameter, shard (2, 3))"

"""The conformance suite on the fakes: it passes for every outcome of the contract, and fails for every rule broken."""

from __future__ import annotations

import unittest
from collections.abc import Sequence

import pytest
import torch

from gtp.testing.conformance import DistributedWeightConformance
from gtp.testing.fakes import VIOLATIONS, FakeDistributedWeight, Mode, Violation, violating_weight


class FakeConformance(DistributedWeightConformance):
    """Fakes that scale nothing in forward and backward, so outputs are the plain ones, and gradients by 4 (exact)."""

    __test__ = False
    mode: Mode = "ready"
    rows_of_shard = (3, 7)

    def options(self, requires_grad: bool) -> dict[str, object]:
        return {
            "mode": self.mode,
            "rows": self.rows_of_shard,
            "requires_grad": requires_grad,
            "scale_forward": 1,
            "scale_backward": 1,
            "scale_finalize": 4,
        }

    def make_weight(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        return FakeDistributedWeight(full, **self.options(requires_grad))  # type: ignore[arg-type]

    def make_group(self, fulls: Sequence[torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
        return list(FakeDistributedWeight.make_group(fulls, **self.options(requires_grad)))

    def expected_gradient(self, wgrad: torch.Tensor) -> torch.Tensor:
        return 4 * wgrad[slice(*self.rows_of_shard)]


class TestReady(FakeConformance):
    __test__ = True


class TestDeferred(FakeConformance):
    __test__ = True
    mode = "deferred"


class TestMainGrad(FakeConformance):
    __test__ = True
    mode = "main_grad"

    def gradient_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        return weight.main_grad if weight.grad_added_to_main_grad else None  # type: ignore[attr-defined]


class TestShardIsAllOfIt(FakeConformance):
    __test__ = True
    rows_of_shard = (0, 10)


class TestGroupOfOneWeight(FakeConformance):
    __test__ = True
    experts = 1


class TestEmptyShard(FakeConformance):
    """A rank whose shard has no rows."""

    __test__ = True
    rows_of_shard = (10, 10)


class TestBfloat16(FakeConformance):
    __test__ = True
    dtype = torch.bfloat16


class TestWithoutGroups(FakeConformance):
    __test__ = True
    has_groups = False

    def make_group(self, fulls: Sequence[torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
        raise AssertionError("make_group was asked although has_groups is False")


def test_run_reports_every_test_of_the_class() -> None:
    ran = FakeConformance().run()
    assert ran == FakeConformance.all_tests()
    assert len(ran) > 20


def test_run_leaves_out_what_was_skipped() -> None:
    ran = TestWithoutGroups().run()
    assert set(FakeConformance.all_tests()) - set(ran) == {
        "test_grouped_linear",
        "test_materialize_gives_a_group_in_order",
    }
    with pytest.raises(unittest.SkipTest, match="TestWithoutGroups has no weight groups"):
        TestWithoutGroups().test_grouped_linear()


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda v: f"{v.method}-{v.kind}")
def test_every_broken_rule_fails_it(violation: Violation) -> None:
    class Broken(FakeConformance):
        has_groups = False

        def make_weight(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
            return violating_weight(full, violation, **self.options(requires_grad))

    with pytest.raises(AssertionError, match=r"Broken\.test_"):
        Broken().run()


class WrongNumbers(FakeConformance):
    """Answers of the right form and the wrong value."""

    wrong: dict[str, object]

    def options(self, requires_grad: bool) -> dict[str, object]:
        return super().options(requires_grad) | self.wrong


@pytest.mark.parametrize("wrong", [{"scale_forward": 1.5}, {"scale_backward": 1.5}, {"scale_finalize": 4.5}])
def test_every_wrong_number_fails_it(wrong: dict[str, object]) -> None:
    suite = WrongNumbers()
    suite.wrong = wrong
    with pytest.raises(AssertionError, match=r"WrongNumbers\.test_.*differs by up to"):
        suite.run()


def test_a_shared_grad_buffer_fails_it() -> None:
    class Shared(FakeDistributedWeight):
        def grad_buffer(self, **options: object) -> torch.Tensor:
            return self.fake.full

    class SharedConformance(FakeConformance):
        def make_group(self, fulls: Sequence[torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
            group = Shared.make_group(fulls, **self.options(requires_grad))
            for weight in group[1:]:
                weight.fake.full = group[0].fake.full
            return list(group)

    with pytest.raises(AssertionError, match="the buffer of weight 0 is another's too"):
        SharedConformance().test_grad_buffers_are_full_and_apart()


def test_a_frozen_weight_that_gets_a_gradient_fails_it() -> None:
    class Thawed(FakeConformance):
        def make_weight(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
            return super().make_weight(full, True)

    with pytest.raises(AssertionError, match="has a gradient"):
        Thawed().test_frozen()


def test_what_must_be_overridden_is_named() -> None:
    with pytest.raises(NotImplementedError, match="must implement make_weight"):
        DistributedWeightConformance().test_linear()

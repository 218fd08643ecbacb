"""`DistributedWeightConformance`: a test class to subclass, which tells an implementer of the contract what is missing.

    class TestMyWeight(DistributedWeightConformance):
        def make_weight(self, full, requires_grad): return MyWeight(full, requires_grad=requires_grad)
        def make_group(self, fulls, requires_grad): return my_group(fulls, requires_grad)
        def expected_gradient(self, wgrad): return wgrad[self.rows_of_this_rank]

pytest collects it as it is. On several ranks run it inside each: `TestMyWeight().run()`; all ranks compute the same on
the same numbers, so a mean over ranks is what one rank computes. Everything is compared bit for bit. A failure is an
`AssertionError`, or the error that the weight or the dispatchers raised. Nothing here needs pytest.
"""

from __future__ import annotations

import copy
import dataclasses
import unittest
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gtp.modules import GroupedLinear, LayerNormLinear, Linear
from gtp.protocol import (
    DistributedWeight,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    weight_grad_buffers,
)
from gtp.testing.conformance_case import Case, ModuleForward, assert_same, finalize_only, on_no_rows

Forward = Callable[[torch.Tensor], torch.Tensor]


class DistributedWeightConformance:
    """The contract of `gtp.protocol.DistributedWeight`, as tests.

    Attributes:
        dtype, device: Of the weights under test.
        rows, features: Shape of the full weights `[rows, features]`; choose rows that do not divide by your group.
        experts: Weights of a group.
        has_groups: Whether `make_group` is implemented.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    rows: int = 10
    features: int = 6
    experts: int = 3
    has_groups: bool = True

    # -- to override -------------------------------------------------------------------------------------------

    def make_weight(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """A weight whose full value is `full` `[rows, features]`, a plain tensor, the same on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must implement make_weight")

    def make_group(self, fulls: Sequence[torch.Tensor], requires_grad: bool) -> list[torch.Tensor]:
        """Weights that are gathered together, leader first. Only asked where `has_groups`."""
        raise NotImplementedError(f"{type(self).__name__} must implement make_group, or set has_groups = False")

    def expected_gradient(self, wgrad: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's shard when every rank computed the full wgrad `wgrad` `[rows, features]`."""
        raise NotImplementedError(f"{type(self).__name__} must implement expected_gradient")

    def gradient_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The accumulated gradient of the shard, a plain tensor, or None if there is none. Default: `weight.grad`."""
        return weight.grad

    # -- running -----------------------------------------------------------------------------------------------

    @classmethod
    def all_tests(cls) -> list[str]:
        """Names of all tests."""
        return sorted(name for name in dir(cls) if name.startswith("test_"))

    def run(self) -> list[str]:
        """Runs all tests in this process, in the same order on all ranks; returns the names of those that ran.

        Raises:
            AssertionError: the first test that failed, by name, from its error.
        """
        ran = []
        for name in self.all_tests():
            try:
                getattr(self, name)()
            except unittest.SkipTest:
                continue
            except Exception as error:
                raise AssertionError(f"{type(self).__name__}.{name}: {error}") from error
            ran.append(name)
        return ran

    # -- the contract's methods, through the dispatchers -------------------------------------------------------

    def test_is_a_tensor_that_satisfies_the_protocol(self) -> None:
        weight = self._weight()
        assert is_distributed_weight(weight)
        assert isinstance(weight, torch.Tensor)
        assert isinstance(weight, DistributedWeight)
        assert weight.is_leaf
        assert weight.requires_grad

    def test_frozen_weight_does_not_require_grad(self) -> None:
        assert not self.make_weight(self._full(), False).requires_grad

    def test_both_materializes_give_the_full_weight(self) -> None:
        full = self._full()
        weight = self.make_weight(full, True)
        for materialize in (materialize_weight_for_forward, materialize_weight_for_backward):
            (got,) = materialize([weight])
            assert_same(got.detach(), full, materialize.__name__)

    def test_materialize_may_be_repeated_and_left_unused(self) -> None:
        full = self._full()
        weight = self.make_weight(full, True)
        held = [materialize_weight_for_forward([weight])[0] for _ in range(3)]
        for again in held:
            assert_same(again.detach(), full, "a full weight that is held")

    def test_materialize_gives_a_group_in_order(self) -> None:
        fulls = self._fulls()
        group = self.make_group(fulls, True)
        for materialize in (materialize_weight_for_forward, materialize_weight_for_backward):
            for got, full in zip(materialize(group), fulls, strict=True):
                assert_same(got.detach(), full, materialize.__name__)

    def test_grad_buffers_are_full_and_apart(self) -> None:
        buffers = weight_grad_buffers(self._group())
        assert buffers is not None
        for i, buffer in enumerate(buffers):
            assert buffer.shape == (self.rows, self.features), f"grad_buffer has shape {tuple(buffer.shape)}"
            assert not buffer.requires_grad
            buffer.fill_(i)
        for i, buffer in enumerate(buffers):
            assert torch.equal(buffer, torch.full_like(buffer, i)), f"the buffer of weight {i} is another's too"

    def test_finalize_takes_a_wgrad_from_elsewhere(self) -> None:
        # Callers may compute the wgrad in memory of their own, and let go of it at once.
        weight, wgrad = self._weight(), self._random(self.rows, self.features)
        x = torch.ones(1, device=self.device, requires_grad=True)
        finalize_only(x, weight, wgrad).sum().backward()
        self._check_gradient(weight, [wgrad], "a wgrad in the caller's memory")

    # -- through modules ---------------------------------------------------------------------------------------

    def test_linear(self) -> None:
        self._step(self._linear())

    def test_linear_without_bias(self) -> None:
        self._step(self._linear(bias=False))

    def test_layernorm_linear(self) -> None:
        self._step(self._layernorm_linear("LayerNorm"))

    def test_rmsnorm_linear(self) -> None:
        self._step(self._layernorm_linear("RMSNorm"))

    def test_grouped_linear(self) -> None:
        self._step(self._grouped_linear())

    def test_input_without_gradient(self) -> None:
        for case in self._cases():
            self._step(case, input_grad=False)

    def test_no_rows(self) -> None:
        for case in self._cases():
            self._step(dataclasses.replace(case, forward=on_no_rows(case.forward)))

    def test_used_twice_in_one_backward(self) -> None:
        for case in self._cases():
            self._step(case, uses=2)

    def test_backwards_accumulate(self) -> None:
        for case in self._cases():
            self._accumulate(case, [(0,), (1,)])

    def test_two_forwards_then_two_backwards(self) -> None:
        for case in self._cases():
            self._accumulate(case, [(0, 1)])

    def test_backward_twice_over_one_graph(self) -> None:
        for case in self._cases():
            x, factor = self._input(0), self._factor(0)
            loss = (case.forward(case.module, x) * factor).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            wgrads = self._plain_wgrads(case, 0)
            for name, wgrad in wgrads.items():
                self._check_gradient(case.parameter(name), [wgrad, wgrad], f"{case.name}.{name}")

    def test_frozen(self) -> None:
        for case in self._cases(requires_grad=False):
            self._step(case, frozen=True)

    def test_no_grad(self) -> None:
        self._without_autograd(torch.no_grad)

    def test_inference_mode(self) -> None:
        self._without_autograd(torch.inference_mode)

    def test_checkpoint_reentrant(self) -> None:
        for case in self._cases():
            self._step(case, around=lambda f, x: cast(torch.Tensor, checkpoint(f, x, use_reentrant=True)), uses=2)

    def test_checkpoint_non_reentrant(self) -> None:
        for case in self._cases():
            self._step(case, around=lambda f, x: cast(torch.Tensor, checkpoint(f, x, use_reentrant=False)), uses=2)

    # -- how -----------------------------------------------------------------------------------------------------

    def _step(
        self,
        case: Case,
        *,
        uses: int = 1,
        input_grad: bool = True,
        frozen: bool = False,
        around: Callable[[Forward, torch.Tensor], torch.Tensor] = lambda f, x: f(x),
    ) -> None:
        """Forward of `uses` inputs, one backward, and everything compared with the plain module."""
        xs = [self._input(i, input_grad) for i in range(uses)]
        plain_xs = [self._input(i, input_grad) for i in range(uses)]
        ys = [around(lambda x: case.forward(case.module, x), x) for x in xs]
        plain_ys = [case.forward(case.plain, x) for x in plain_xs]
        for y, plain in zip(ys, plain_ys, strict=True):
            assert_same(y.detach(), plain.detach(), f"{case.name}: output")
        self._loss(ys).backward()
        self._loss(plain_ys).backward()
        if input_grad:
            for x, plain in zip(xs, plain_xs, strict=True):
                assert_same(x.grad, plain.grad, f"{case.name}: gradient of the input")
        wgrads = [self._plain_wgrads(case, i) for i in range(uses)]
        for name, parameter in case.plain.named_parameters():
            if name not in case.weights:
                assert_same(case.parameter(name).grad, parameter.grad, f"{case.name}.{name}: gradient")
            elif not frozen:
                self._check_gradient(case.parameter(name), [w[name] for w in wgrads], f"{case.name}.{name}")
        if frozen:
            self._check_no_gradient(case)

    def _accumulate(self, case: Case, together: list[tuple[int, ...]]) -> None:
        """Forwards of each tuple's inputs, then their backwards one by one, then the next tuple's."""
        for indices in together:
            losses = [(case.forward(case.module, self._input(i)) * self._factor(i)).sum() for i in indices]
            for loss in losses:
                loss.backward()
        order = [i for indices in together for i in indices]
        wgrads = [self._plain_wgrads(case, i) for i in order]
        for name in case.weights:
            self._check_gradient(case.parameter(name), [w[name] for w in wgrads], f"{case.name}.{name}")

    def _without_autograd(self, mode: Callable[[], Any]) -> None:
        for case in self._cases():
            with mode():
                y = case.forward(case.module, self._input(0))
            assert not y.requires_grad
            assert_same(y, case.forward(case.plain, self._input(0)).detach(), f"{case.name}: output")
            self._check_no_gradient(case)
            self._step(case)

    def _check_no_gradient(self, case: Case) -> None:
        for name in case.weights:
            assert self.gradient_of(case.parameter(name)) is None, f"{case.name}.{name}: has a gradient"

    def _check_gradient(self, weight: torch.Tensor, wgrads: list[torch.Tensor], what: str) -> None:
        """The gradient is the sum, in either order for two, of what each backward or use contributed."""
        got = self.gradient_of(weight)
        assert got is not None, f"{what}: no gradient"
        expected = self.expected_gradient(wgrads[0])
        for wgrad in wgrads[1:]:
            expected = expected + self.expected_gradient(wgrad)
        assert_same(got, expected, f"{what}: gradient of the shard")

    def _plain_wgrads(self, case: Case, index: int) -> dict[str, torch.Tensor]:
        """The full wgrads of one use, by torch's autograd."""
        twin = copy.deepcopy(case.plain).requires_grad_()
        loss = (case.forward(twin, self._input(index)) * self._factor(index)).sum()
        grads = torch.autograd.grad(loss, [twin.get_parameter(name) for name in case.weights])
        return dict(zip(case.weights, grads, strict=True))

    def _loss(self, ys: list[torch.Tensor]) -> torch.Tensor:
        total = (ys[0] * self._factor(0)).sum()
        for i, y in enumerate(ys[1:], 1):
            total = total + (y * self._factor(i)).sum()
        return total

    # -- cases ---------------------------------------------------------------------------------------------------

    def _cases(self, requires_grad: bool = True) -> list[Case]:
        cases = [self._linear(requires_grad), self._layernorm_linear("LayerNorm", requires_grad)]
        return [*cases, self._grouped_linear(requires_grad)] if self.has_groups else cases

    def _linear(self, requires_grad: bool = True, bias: bool = True) -> Case:
        plain = Linear(self.features, self.rows, bias=bias, params_dtype=self.dtype, device=self.device)
        return self._case("Linear", plain, ["weight"], lambda m, x: m(x), requires_grad)

    def _layernorm_linear(self, kind: Any, requires_grad: bool = True) -> Case:
        plain = LayerNormLinear(
            self.features, self.rows, normalization=kind, params_dtype=self.dtype, device=self.device
        )
        return self._case(f"LayerNormLinear({kind})", plain, ["weight"], lambda m, x: m(x), requires_grad)

    def _grouped_linear(self, requires_grad: bool = True) -> Case:
        self._require_groups()
        plain = GroupedLinear(self.experts, self.features, self.rows, params_dtype=self.dtype, device=self.device)
        # an expert without tokens, and three rows of padding
        splits = ([3] + [0] * (self.experts - 2) + [2])[: self.experts]

        def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, module(x, splits if x.numel() else [0] * self.experts))

        return self._case("GroupedLinear", plain, plain.weight_groups()[0], forward, requires_grad)

    def _case(
        self,
        name: str,
        plain: nn.Module,
        weights: list[str],
        forward: ModuleForward,
        requires_grad: bool,
    ) -> Case:
        with torch.no_grad():
            for i, parameter in enumerate(plain.parameters()):
                parameter.copy_(self._random(*parameter.shape, seed=100 + i))
        module = copy.deepcopy(plain)
        fulls = [module.get_parameter(n).detach().clone() for n in weights]
        made = (
            self.make_group(fulls, requires_grad) if len(weights) > 1 else [self.make_weight(fulls[0], requires_grad)]
        )
        for n, weight in zip(weights, made, strict=True):
            module._parameters[n] = cast(nn.Parameter, weight)
            plain.get_parameter(n).requires_grad_(requires_grad)
        return Case(name, module, plain, forward, weights)

    def _require_groups(self) -> None:
        if not self.has_groups:
            raise unittest.SkipTest(f"{type(self).__name__} has no weight groups")

    def _weight(self) -> torch.Tensor:
        return self.make_weight(self._full(), True)

    def _group(self) -> list[torch.Tensor]:
        return self.make_group(self._fulls(), True) if self.has_groups else [self._weight()]

    def _full(self) -> torch.Tensor:
        return self._random(self.rows, self.features, seed=1)

    def _fulls(self) -> list[torch.Tensor]:
        self._require_groups()
        return [self._random(self.rows, self.features, seed=1 + i) for i in range(self.experts)]

    def _input(self, index: int, requires_grad: bool = True) -> torch.Tensor:
        return self._random(4, 2, self.features, seed=50 + index).requires_grad_(requires_grad)

    def _factor(self, index: int) -> torch.Tensor:
        return self._random(self.rows, seed=80 + index)

    def _random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

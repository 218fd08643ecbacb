"""Modules that are built at shard size, as Megatron hands Transformer Engine's over: what is made of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import gtp
from gtp.megatron import kept_full
from gtp.testing.memory import live_full_storages
from tests.megatron.models import model_config
from tests.megatron.training import Case, environment
from tests.weights.side_by_side import settled

CASE = Case(gtp=2, alignment=4, cpu_init=False)
ROWS = 10  # two shards of 8, six rows of padding


class Column(torch.nn.Module):
    """A linear with a bias, or several as one module, the way Megatron builds Transformer Engine's under the flag: it
    asks for the shard's number of features, and says afterwards how many there are."""

    def __init__(self, config: Any, group: Any, names: tuple[str, ...]) -> None:
        from megatron.core.tensor_parallel import gtp_api

        super().__init__()
        rows, padding = gtp_api.gtp_remat_shard_dim0(ROWS, group)
        self.config, self.num_gemms = config, len(names)
        for name in names:
            full = torch.cat([torch.arange(6.0 * ROWS).view(ROWS, 6), torch.zeros(padding, 6)])
            shard = full[group.rank() * rows : (group.rank() + 1) * rows].clone()
            self.register_parameter(name, torch.nn.Parameter(shard))
            bias = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))
            bias.sequence_parallel = True  # type: ignore[attr-defined]
            self.register_parameter(name.replace("weight", "bias"), bias)
        gtp_api.attach_gtp_to_presharded_module(self, group, padding, is_grouped=len(names) > 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias.to(x.dtype))


def biases(names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    from megatron.core import parallel_state

    with environment(CASE):
        group = parallel_state.get_gtp_weight_remat_group()
        module = Column(model_config(CASE), group, names)
        found = [getattr(module, name.replace("weight", "bias")) for name in names]
        output = None
        if len(names) == 1:
            with torch.no_grad():
                module.bias.copy_(torch.arange(float(ROWS)))
            x = torch.ones(2, 6)
            output = module(x)
            output.sum().backward()
        return [(b.detach(), b.dtype, b.sequence_parallel, b.grad, None if output is None else output) for b in found]


def test_biases_are_whole(ranks: Any):
    """Not as long as the shard, beside outputs that are as long as the weight."""
    full = torch.arange(6.0 * ROWS).view(ROWS, 6)
    for ((bias, dtype, marked, grad, output),) in ranks(2).run(biases, ("weight",)):
        assert torch.equal(bias, torch.arange(float(ROWS), dtype=torch.float64))
        assert (dtype, marked) == (torch.float64, True)
        assert torch.equal(grad, torch.full((ROWS,), 2.0, dtype=torch.float64))
        assert torch.equal(output.detach(), torch.ones(2, 6) @ full.t() + torch.arange(float(ROWS)))
    for found in ranks(2).run(biases, ("weight0", "weight1")):
        assert [bias.tolist() for bias, *_ in found] == [[0.0] * ROWS] * 2


class _Kept(torch.autograd.Function):
    """Keeps the gathered weight on its node, as Transformer Engine's does, and asks for it again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight.materialize_group_for_forward()
        return x @ ctx.weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert ctx.weight.requires_grad
        assert ctx.weight.shape == (ROWS, 6)
        dgrad = grad @ weight.materialize_group_for_backward()
        return dgrad, weight.finalize_group_grads(grad.t() @ x)


class LayerNormLinear(Column):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Kept.apply(x, self.weight)


def full_weights() -> int:
    return sum((ROWS, 6) in storage.shapes and storage.nbytes >= 4 * ROWS * 6 for storage in live_full_storages(1))


def kept_until_backward(expected: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    from megatron.core import parallel_state

    with environment(CASE):
        module = LayerNormLinear(model_config(CASE), parallel_state.get_gtp_weight_remat_group(), ("weight",))
        x = torch.ones(2, 6, requires_grad=True)
        output = module(x)
        node = output.grad_fn
        assert node is not None
        waiting = settled(full_weights, lambda found: found == expected)
        is_nan = bool(node.weight.isnan().all())  # type: ignore[attr-defined]
        output.sum().backward()
        grad = module.weight.grad[module.weight.layout.valid_slice]
        return waiting, output.detach(), x.grad, grad, is_nan


def test_a_layer_that_keeps_what_it_gathered_holds_no_full_weight_until_backward(ranks: Any):
    full = torch.arange(6.0 * ROWS).view(ROWS, 6)
    for waiting, output, dgrad, wgrad, is_nan in ranks(2).run(kept_until_backward, 0):
        assert (waiting, is_nan) == (0, True)
        assert torch.equal(output, torch.ones(2, 6) @ full.t())
        assert torch.equal(dgrad, torch.ones(2, ROWS) @ full)
        assert torch.equal(wgrad, torch.full_like(wgrad, 2.0))
        assert len(wgrad) > 0


def test_by_itself_it_would_hold_it(ranks: Any):
    """What the test above would see."""
    for waiting, *_, is_nan in ranks(2).run(kept_by_itself):
        assert (waiting, is_nan) == (1, False)


def kept_by_itself() -> Any:
    with mock.patch.object(kept_full, "_KEEPER", "no such class"):
        return kept_until_backward(1)


def initialized_on_the_cpu() -> str:
    from megatron.core import parallel_state

    with environment(CASE):
        config = model_config(CASE)
        config.use_cpu_initialization = True
        with pytest.raises(gtp.UnsupportedError) as error:
            Column(config, parallel_state.get_gtp_weight_remat_group(), ("weight",))
    return str(error.value)


def test_what_would_be_filled_with_all_rows_later_is_refused(ranks: Any):
    for text in ranks(2).run(initialized_on_the_cpu):
        assert text.startswith("use_cpu_initialization=True with tensor_parallel_num_weight_shards: Column would fill")

"""Modules that are built at shard size, as Megatron hands Transformer Engine's over: what is made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gtp
from tests.megatron.models import model_config
from tests.megatron.training import Case, environment

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

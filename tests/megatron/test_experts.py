"""Experts: their own GTP axis, grouped modules gathered as one, and prefetch a whole block ahead."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import torch

import gtp
import gtp.megatron
from gtp.runtime.process_group import ProcessGroupTransport
from tests.megatron.training import Case, Job, environment, model_config

EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def events_of_a_step() -> list[tuple[str, str]]:
    """("gather" | "use", weight) in order, in the forward of a step that the schedule knows by now."""
    case = Case(gtp=2, egtp=2, experts=4, layers=3)
    events: list[tuple[str, str]] = []
    start, use = ProcessGroupTransport.start_gather, gtp.megatron.MegatronGTPWeight.materialize_group_for_forward

    def gather(transport: Any, group: Any, *args: Any) -> Any:
        events.append(("gather", group.name))
        return start(transport, group, *args)

    def forward(weight: Any) -> Any:
        events.append(("use", weight.name))
        return use(weight)

    with environment(case):
        job = Job(case)
        for step in range(3):
            job.step(step)
        with (
            mock.patch.object(ProcessGroupTransport, "start_gather", gather),
            mock.patch.object(gtp.megatron.MegatronGTPWeight, "materialize_group_for_forward", forward),
        ):
            job.step(3)
    last_use = max(position for position, (kind, _) in enumerate(events) if kind == "use")
    return events[: last_use + 1]


def test_expert_gathers_start_a_block_before_their_use(ranks: Any):
    for events in ranks(2).run(events_of_a_step):
        gathers = {name: position for position, (kind, name) in reversed([*enumerate(events)]) if kind == "gather"}
        uses: dict[str, int] = {}
        for position, (kind, name) in enumerate(events):
            if kind == "use":
                uses.setdefault(name, position)
        block_begins = {
            layer: min(p for n, p in uses.items() if (m := LAYER.match(n)) and int(m[1]) == layer) for layer in range(3)
        }
        experts = {name: int(match[1]) for name in uses if (match := EXPERT.match(name))}
        assert len(experts) == 3 * 4 * 2
        for name, layer in experts.items():
            if layer > 0:
                assert gathers[name] < block_begins[layer], name


class Grouped(torch.nn.Module):
    """Experts as one module with a weight each, as Transformer Engine's GroupedLinear has them."""

    def __init__(self, config: Any, group: Any, *, presharded: bool) -> None:
        from megatron.core.tensor_parallel import gtp_api

        super().__init__()
        self.config, self.num_gemms = config, 3
        rows, padding = gtp_api.gtp_remat_shard_dim0(10, group)
        for index in range(self.num_gemms):
            full = torch.arange(60.0).view(10, 6) + 100 * index
            padded = torch.cat([full, torch.full((padding, 6), 7.0)])
            shard = padded[group.rank() * rows : (group.rank() + 1) * rows].clone()
            self.register_parameter(f"weight{index}", torch.nn.Parameter(shard if presharded else full))
        if presharded:
            gtp_api.attach_gtp_to_presharded_module(self, group, padding, is_grouped=True)
        else:
            gtp_api.wrap_module_params_gtp(self, ["weight0", "weight1", "weight2"], group, is_grouped=True)

    def forward(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(_GroupedGemm.apply(self.weight0, self.weight1, self.weight2, *parts))


class _GroupedGemm(torch.autograd.Function):
    """Megatron's protocol over several weights: lists in, lists out."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        weights, parts = args[:3], args[3:]
        ctx.save_for_backward(*args)
        full = weights[0].all_gather_and_prefetch(fwd=True)
        return tuple(x @ w.t() for x, w in zip(parts, full, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, parts = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        full = weights[0].all_gather_and_prefetch_bwd()
        dgrads = [g @ w for g, w in zip(grads, full, strict=True)]
        wgrads = weights[0].wgrad_reduce_scatter([g.t() @ x for g, x in zip(grads, parts, strict=True)])
        return (*wgrads, *dgrads)


def grouped(presharded: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    case = Case(gtp=2, alignment=4, cpu_init=False)
    with environment(case):
        group = parallel_state.get_gtp_weight_remat_group()
        module = Grouped(model_config(case), group, presharded=presharded)
        weights = [module.weight0, module.weight1, module.weight2]
        for weight in weights:
            weight.main_grad = torch.zeros(8, 6)
            weight.grad_added_to_main_grad = False
        parts = [torch.full((2, 6), float(index + group.rank()), requires_grad=True) for index in range(3)]
        outputs = module(parts)
        sum(out.sum() for out in outputs).backward()
        runtime = gtp.megatron.runtime_of(module)
        return {
            "full": [weight.full_tensor() for weight in weights],
            "outputs": [out.detach() for out in outputs],
            "dgrads": [part.grad for part in parts],
            "main_grads": [weight.main_grad for weight in weights],
            "leader": (
                weights[0].weight_list is not None and weights[0].weight_list[2] is weights[2],
                weights[0].is_routed_expert,
            ),
            "groups": [(g.name, len(g.members)) for g in runtime.groups],
            "consumes": runtime.stats().consumes,
            "padding": [bool(w.detach()[w.layout.valid_rows :].any()) for w in weights],
        }


def test_a_grouped_module_is_gathered_and_reduced_as_one(ranks: Any):
    for presharded in (False, True):
        for rank, facts in enumerate(ranks(2).run(grouped, presharded)):
            full = [torch.arange(60.0).view(10, 6) + 100 * index for index in range(3)]
            assert all(torch.equal(a, b) for a, b in zip(facts["full"], full, strict=True))
            for index in range(3):
                x = torch.full((2, 6), float(index + rank))
                assert torch.equal(facts["outputs"][index], x @ full[index].t())
                assert torch.equal(facts["dgrads"][index], torch.ones(2, 10) @ full[index])
                # the mean of 2 * index on rank 0 and 2 * (index + 1) on rank 1; rows 10 to 15 are padding
                expected = torch.zeros(16, 6)
                expected[:10] = 2 * index + 1
                assert torch.equal(facts["main_grads"][index], expected[8 * rank : 8 * rank + 8])
            assert facts["leader"] == (True, True)
            assert facts["groups"] == [("weight0 (+2)", 3)]
            assert facts["consumes"] == 2
            assert not any(facts["padding"])

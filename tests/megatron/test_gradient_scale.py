"""The scale of gradients: of experts, of ranks with unequal numbers of tokens, and of sums in low precision."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.megatron.weight import MegatronGTPWeight
from gtp.runtime.process_group import gather_now
from tests.megatron import training
from tests.megatron.training import Case, Job, bare_models, environment, model_config


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


def _few_tokens(case: Case, data: Any, model: nn.Module) -> tuple[torch.Tensor, Any]:
    """As training's own, where rank r of four counts 1, 3, 8 and no tokens."""
    batch = next(data)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    weight = torch.zeros_like(labels, dtype=torch.float)
    weight.view(-1)[: (1, 3, 8, 0)[dist.get_rank()]] = 1
    mask = torch.ones(1, 1, training.SEQ, training.SEQ, dtype=torch.bool).triu(1)
    positions = torch.arange(training.SEQ).expand_as(tokens)
    return model(tokens, positions, mask, labels=labels, loss_mask=weight), partial(training._loss, case, weight)


def _unequal_tokens() -> tuple[list[float], list[float], dict[str, float]]:
    case = Case(gtp=4, per_token=True)
    found: list[dict[str, torch.Tensor]] = []
    losses = []
    with mock.patch.object(training, "_forward_step", _few_tokens):
        for one in (case.unsharded(), case):
            with environment(one):
                job = Job(one)
                job.step(0, update=False)
                grads = {}
                for name, p in job.chunks[0].module.named_parameters():
                    grad = p.main_grad.detach().clone()
                    if isinstance(p, MegatronGTPWeight):
                        grad = gather_now(grad.view(p.layout.shard_shape), p.group)[: p.layout.rows]
                    grads[name] = grad
                found.append(grads)
            losses.append(training.train(dataclasses.replace(one, steps=3)).losses)
    plain, sharded = found
    return *losses, {n: float((plain[n] - sharded[n]).abs().max() / plain[n].abs().max()) for n in plain}


def test_ranks_count_as_many_tokens_as_they_have(ranks: Any) -> None:
    """C23: with `calculate_per_token_loss` gradients are added and divided by all tokens; a rank may have none."""
    for plain, sharded, distances in ranks(4).run(_unequal_tokens):
        # four ranks' gradients, added in another order: 16 units in the last place of the largest value
        assert {name: d for name, d in distances.items() if not d <= 16 * 2**-24} == {}
        assert len(distances) > 10
        assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) <= 2e-6


def _sum_of_bf16(per_token: bool) -> tuple[torch.Tensor, torch.dtype]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    case = Case(gtp=4, bf16=True, per_token=per_token)
    with environment(case):
        config = model_config(case)
        layer = ColumnParallelLinear(
            8, 16, config=config, init_method=config.init_method, bias=False, skip_bias_add=False
        )
        layer.weight.main_grad = torch.zeros(4, 8)
        layer.weight.grad_added_to_main_grad = False
        x = torch.full((1, 1, 8), 256.0 if dist.get_rank() == 0 else 0.5, dtype=torch.bfloat16)
        layer(x)[0].backward(torch.ones(1, 1, 16, dtype=torch.bfloat16))
        return layer.weight.main_grad, layer.weight.dtype


def test_bf16_gradients_are_added_in_fp32(ranks: Any) -> None:
    """C26: 256 and three times 0.5. bf16 has no number between 256 and 258."""
    for per_token, expected in ((True, 257.5), (False, 257.5 / 4)):
        for grad, dtype in ranks(4).run(_sum_of_bf16, per_token):
            assert dtype == torch.bfloat16
            assert torch.equal(grad, torch.full((4, 8), expected))


def _normalized_otherwise_than_its_layers() -> tuple[list[float], list[float]]:
    """Gradient norms of a model whose own config, made after its layers were built, asks for another normalization."""
    norms = []
    for case in (Case(per_token=True, layers=1), Case(per_token=True, layers=1, gtp=2)):
        with environment(case):
            config = model_config(dataclasses.replace(case, per_token=False))
            (model,) = bare_models(case, config)
            model.config = dataclasses.replace(config, calculate_per_token_loss=True)
            job = Job(case, [model])
            job.step(0)
            norms.append(job.norms)
    return norms[0], norms[1]


def test_the_models_own_config_says_how_gradients_are_normalized(ranks: Any) -> None:
    """C23: as for Megatron's DistributedDataParallel and schedules, whatever the configs of its parts say."""
    for plain, sharded in ranks(2).run(_normalized_otherwise_than_its_layers):
        assert abs(sharded[0] - plain[0]) < 1e-6 * plain[0]

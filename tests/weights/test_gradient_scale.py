"""What the reduction divides by, in which dtype it adds, and how often it rounds. Small integers make it exact."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtp
from gtp.testing.collectives import collective_log
from gtp.testing.ranks import rank, subgroup
from tests.reference import data_parallel_backward, full_grad
from tests.weights.side_by_side import SideBySide, adamw, inputs, linears


def _integer_gradients():
    for size in (2, 3, 4):
        for reduce in ("mean", "sum"):
            for dtype in (torch.float32, torch.bfloat16):
                _integer_gradient(size, reduce, dtype)


def _integer_gradient(size, reduce, dtype):
    """d loss / d weight is x, summed over the batch: rank r feeds ones times 12 (r + 1), which 2, 3 and 4 divide."""
    group = subgroup(tuple(range(size)))
    if group is None:
        return
    model = nn.Linear(8, 8).to(dtype)
    gtp.shard_model(model, group, config=gtp.GTPConfig(grad_reduce=reduce))
    x = torch.full((1, 8), 12.0 * (rank() + 1), dtype=dtype)
    model(x).sum().backward()
    total = 12.0 * sum(range(1, size + 1))
    wanted = total / size if reduce == "mean" else total
    assert torch.equal(full_grad(model.weight), torch.full((8, 8), wanted, dtype=dtype))
    # the bias is replicated: each rank's gradient is 1
    assert torch.equal(model.bias.grad, torch.full((8,), 1.0 if reduce == "mean" else float(size), dtype=dtype))


def test_mean_and_sum_are_what_they_say(ranks):  # C21
    ranks(4).run(_integer_gradients)


TOKENS = [1, 3, 8, 0]


def _masked_targets(step):
    generator = torch.Generator().manual_seed(step)
    batches = []
    for count in TOKENS:
        ids = torch.randint(20, (8,), generator=generator)
        targets = torch.full((8,), -100)
        targets[:count] = torch.randint(20, (count,), generator=generator)
        batches.append((ids, targets))
    return batches


def _summed_loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids), targets, ignore_index=-100, reduction="sum") / sum(TOKENS)


def _unequal_tokens():
    # ranks are added in another order than the reference's for replicated parameters
    twins = SideBySide(lambda: nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), reduce="sum", rtol=1e-5, atol=1e-6)
    torch.manual_seed(7)
    whole = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    for step in range(3):
        twins.backward(_masked_targets(step), _summed_loss)
        if step == 0:  # the single-process run on the joined batch
            ids, targets = (torch.cat(parts) for parts in zip(*_masked_targets(0), strict=True))
            (F.cross_entropy(whole(ids), targets, ignore_index=-100, reduction="sum") / sum(TOKENS)).backward()
            for parameter, reference in zip(twins.sharded.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(full_grad(parameter), reference.grad, rtol=1e-5, atol=1e-6)
        twins.update()


def test_a_loss_over_all_tokens_with_a_rank_that_has_none(ranks):  # C23
    ranks(4).run(_unequal_tokens)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(x + self.body(x))


def _group_of_one(config):
    groups = [subgroup((0,)), subgroup((1,))]
    torch.manual_seed(7)
    plain = Small()
    sharded = copy.deepcopy(plain)
    optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
    with collective_log() as log:
        gtp.shard_model(sharded, groups[rank()], config=config)
        for step in range(5):
            generator = torch.Generator().manual_seed(step + 10 * rank())
            ids = torch.randint(30, (3, 4), generator=generator)
            for model, optimizer in zip((plain, sharded), optimizers, strict=True):
                for _ in range(2):  # two micro-batches
                    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert gtp.grad_norm(sharded.parameters()).item() == 0.0
    assert log.records == []
    for (name, got), wanted in zip(sharded.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name
    return [type(p).__name__ for p in sharded.parameters()]


def test_a_group_of_one_is_the_plain_model_bit_for_bit_and_sends_nothing(ranks):  # C25
    ranks(2).run(_group_of_one, gtp.GTPConfig())
    ranks(2).run(_group_of_one, gtp.GTPConfig(keep_bytes=1 << 20, prefetch_bytes=0))


def _group_of_one_weight_in_other_functions():
    """With one rank, the shard is the weight: what a loss computes from it outside GEMMs adds up with the GEMM's."""
    group = [subgroup((0,)), subgroup((1,))][rank()]
    torch.manual_seed(7)
    plain = linears(3)
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, group)
    x = inputs(0, 4, 16)[0]
    for _ in range(2):
        for model in (plain, sharded):
            penalty = sum(layer.weight.pow(2).sum() for layer in model) + (x @ model[1].weight.t()).sum()
            (model(x).pow(2).sum() + penalty).backward()
        for layer, reference in zip(sharded, plain, strict=True):
            # three contributions, added in another order
            torch.testing.assert_close(full_grad(layer.weight), reference.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_group_of_one_may_use_its_weights_in_any_function(ranks):  # C25
    ranks(2).run(_group_of_one_weight_in_other_functions)


def _wide_accumulation(where):
    """Rank 0's gradient is 256, the others' 0.5: bf16 addition gives 256 or 258, and 257.5 is right."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    config = gtp.GTPConfig(grad_reduce="sum", grad_dtype=torch.float32 if where == "grad" else None)
    gtp.shard_model(model, dist.group.WORLD, config=config)
    if where == "main_grad":
        model.weight.main_grad = torch.zeros(model.weight.shape, dtype=torch.float32)
    x = torch.full((1, 64), 256.0 if rank() == 0 else 0.5, dtype=torch.bfloat16)
    with collective_log() as log:
        model(x).sum().backward()
    got = model.weight.main_grad if where == "main_grad" else model.weight.grad.shard
    assert got.dtype is torch.float32
    assert torch.equal(got, torch.full(got.shape, 257.5))
    exchanged = log.started("all_to_all_single")
    assert len(exchanged) == 1
    assert [r.kind for r in log.started()] == ["all_gather_into_tensor", "all_to_all_single"]
    # a second micro-batch is added in fp32 as well
    model(x).sum().backward()
    got = model.weight.main_grad if where == "main_grad" else model.weight.grad.shard
    assert torch.equal(got.detach(), torch.full(got.shape, 515.0))


def test_bf16_gradients_are_added_in_fp32_and_rounded_once(ranks):  # C26
    for where in ("main_grad", "grad"):
        ranks(4).run(_wide_accumulation, where)


def _rounded_once():
    """`.grad` in bf16: the sum 257.5 of four ranks rounds to 258, in whatever order the ranks are."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(grad_reduce="sum"))
    x = torch.full((1, 64), 256.0 if rank() == 2 else 0.5, dtype=torch.bfloat16)
    model(x).sum().backward()
    assert model.weight.grad.dtype is torch.bfloat16
    assert torch.equal(full_grad(model.weight), torch.full((64, 64), 258.0, dtype=torch.bfloat16))


def test_a_bf16_gradient_is_the_rounded_fp32_sum(ranks):  # C26
    ranks(4).run(_rounded_once)


def _wire(reduce_dtype, dtype):
    model = nn.Linear(16, 16, bias=False, dtype=dtype)
    gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(reduce_dtype=reduce_dtype))
    with collective_log() as log:
        model(torch.ones(1, 16, dtype=dtype)).sum().backward()
    assert torch.equal(full_grad(model.weight), torch.ones(16, 16, dtype=dtype))
    return log.started("all_to_all_single")[0].dtype


def test_reduce_dtype_is_the_dtype_on_the_wire(ranks):
    assert set(ranks(2).run(_wire, torch.bfloat16, torch.float32)) == {torch.bfloat16}
    assert set(ranks(2).run(_wire, torch.float32, torch.bfloat16)) == {torch.float32}
    assert set(ranks(2).run(_wire, None, torch.bfloat16)) == {torch.bfloat16}


def _replicated_axis(reduce, plain_axis):
    """Mesh (replicate 2, gtp 2): gradients are those of four data-parallel ranks; each shard is held twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    torch.manual_seed(7)
    plain = Small()
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, mesh, config=gtp.GTPConfig(grad_reduce=reduce))
    optimizers = [adamw(m.parameters()) for m in (plain, sharded)]

    def loss(model, ids):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        every = [torch.randint(30, (3, 4), generator=generator) for _ in range(4)]
        data_parallel_backward(plain, every, loss, reduce=reduce)
        loss(sharded, every[rank()]).backward()
        for parameter, reference in zip(sharded.parameters(), plain.parameters(), strict=True):
            # sums of four in another order
            torch.testing.assert_close(full_grad(parameter), reference.grad, rtol=1e-5, atol=1e-6)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, sharded)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weight = sharded.table.weight
    assert weight.group.size() == 2
    assert plain_axis == weight.layout.rank
    return weight.shard.clone()


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_replicate_axis_counts_as_data_parallel_ranks(ranks, reduce):
    shards = ranks(4).run(_replicated_axis, reduce, per_rank_args=[(r % 2,) for r in range(4)])
    assert torch.equal(shards[0], shards[2])
    assert torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1])

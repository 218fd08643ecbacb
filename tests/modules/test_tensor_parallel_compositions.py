"""The tensor-parallel blocks under what people put around them: compilation, checkpointing, FSDP2. Over gloo ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gtp.testing.collectives import collective_log
from gtp.testing.ranks import rank
from tests.compiling import fresh_compiler
from tests.modules.llama import Llama, batch

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def build(fused: bool = True, group: dist.ProcessGroup | None = None) -> Llama:
    torch.manual_seed(11)
    return Llama(tp_group=dist.group.WORLD if group is None else group, fused=fused)


def losses_and_gradients(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        model.zero_grad()
        loss = model.loss(*batch(step))
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in model.parameters()]]
    return found


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# --- compilation, a block at a time


def compiled(fused: bool) -> int:
    from torch._dynamo.testing import CompileCounterWithBackend

    with fresh_compiler():
        counter = CompileCounterWithBackend("aot_eager")
        want = losses_and_gradients(build(fused), steps=4)
        model = build(fused)
        for block in model.blocks:
            block.compile(backend=counter)
        got = losses_and_gradients(model, steps=2)
        settled = counter.frame_count
        got += losses_and_gradients(model, steps=4)[len(got) :]
        for a, b in zip(got, want, strict=True):
            # what lies between the GEMMs (norms, attention) is traced in another decomposition than eager's: fp32
            # roundoffs
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert counter.frame_count == settled
    return settled


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_blocks_are_eager_ones_and_settle(ranks, fused):
    """The graph breaks at each collective GEMM and goes on after it; nothing is compiled again after two steps."""
    assert min(ranks(2).run(compiled, fused, timeout=150)) > 0


# --- activation checkpointing


def save_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(block: nn.Module, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    forward = block.forward
    if kind == "reentrant":
        return lambda x: checkpoint(forward, x, use_reentrant=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    extra = {"context_fn": contexts} if kind == "selective" else {}
    return lambda x: checkpoint(forward, x, use_reentrant=False, **extra)


def checkpointed(kind: str) -> None:
    want = losses_and_gradients(build())
    model = build()
    for block in model.blocks:
        block.forward = wrapped(block, kind)
    assert_same(losses_and_gradients(model), want)


@pytest.mark.parametrize("kind", ["reentrant", "whole", "selective"])
def test_activation_checkpointing(ranks, kind):
    """Selective: products are kept and everything else, the gathers too, is done again."""
    ranks(2).run(checkpointed, kind)


def collectives_of_recompute() -> list[str]:
    model = build()
    block = model.blocks[0].ffn
    x = torch.randn(3, 4, 16, requires_grad=True)
    with collective_log() as log:
        y = checkpoint(block, x, use_reentrant=False)
        log.mark("backward")
        y.sum().backward()
    return [r.kind for r in log.records if r.event != "wait"]


def test_what_a_recomputed_block_sends_again(ranks):
    """Its gather and its reduce-scatter; then the three of backward."""
    kinds = ranks(2).run(collectives_of_recompute)[0]
    assert kinds == [GATHER, SCATTER, "backward", GATHER, SCATTER, GATHER, GATHER, SCATTER]


# --- FSDP2 outside


def under_fsdp(fused: bool) -> None:
    """TP slices sharded by FSDP2 over two data ranks; gradients are the data ranks' mean.

    Norms stay out: FSDP2 puts parameters of its own in the place of those that `sum_gradients_over_tp` hooked.
    """
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"].get_group()
    model, plain = build(fused, tp), build(fused, tp)
    norms = {p for name, p in model.named_parameters() if "norm" in name}
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], ignored_params=norms)
    fully_shard(model, mesh=mesh["dp"], ignored_params=norms)
    for step in range(2):
        batches = [batch(10 * step + data) for data in range(2)]
        model.zero_grad()
        plain.zero_grad()
        fsdp_loss(model, batches[rank() // 2]).backward()
        for one in batches:
            (plain.loss(*one) / 2).backward()
        for name, q in plain.named_parameters():
            p = model.get_parameter(name)
            if p in norms:  # replicated over the data ranks: their mean is the user's, as for any ignored parameter
                dist.all_reduce(p.grad, group=mesh["dp"].get_group())
                got = p.grad / 2
            else:
                got = p.grad.full_tensor()
            # one addition over data ranks, halved before or after it: powers of two, exact
            assert torch.equal(got, q.grad), name


def fsdp_loss(model: nn.Module, one: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    # FSDP2's hooks are on forward
    ids, targets = one
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("fused", [False, True])
def test_fsdp2_outside(ranks, fused):
    ranks(4).run(under_fsdp, fused)


def state_dict_under_fsdp() -> list[str]:
    """A weight that FSDP2 spreads is saved whole, under its own name: see `FusedParameters`."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    torch.manual_seed(11)
    model = Llama(layers=1)
    fully_shard(model.blocks[0], mesh=mesh)
    return [name for name in model.state_dict() if "ffn" in name or "qkv" in name]


def test_state_dict_under_fsdp2(ranks):
    names = ["blocks.0.qkv.weight", "blocks.0.ffn.w13", "blocks.0.ffn.w2.weight"]
    assert ranks(2).run(state_dict_under_fsdp)[0] == names

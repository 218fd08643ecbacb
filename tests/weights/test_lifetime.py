"""Gathered weights and wgrads lie in pooled buffers: none is overwritten while read, and only the documented number
exists.

`late_collectives` holds every result back and poisons its destination until it is waited for, so a buffer that is read
or reused too early shows as NaN or a `RaceError`. One test: `pytest tests/weights/test_lifetime.py -k embedding`.
"""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.testing.collectives import late_collectives
from gtp.testing.memory import poisoned_memory, saved_tensors
from gtp.testing.ranks import rank
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, linears, live_count, settled, sgd

WIDTH = 64
FULL = WIDTH * WIDTH * 4  # bytes of one full weight of the stacks below


class TwoTables(nn.Module):
    """A lookup directly followed by an untied head of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def _ids(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(64, (4, 5), generator=generator) for _ in range(dist.get_world_size())]


def _cross_entropy(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _equal_neighbours(prefetch_bytes):
    config = gtp.GTPConfig(prefetch_bytes=prefetch_bytes)
    twins = SideBySide(TwoTables, config=config)
    with late_collectives(), poisoned_memory():
        for step in range(3):
            assert torch.isfinite(twins.step(_ids(step), _cross_entropy))


def test_a_head_of_the_tables_shape_never_overwrites_the_table(ranks):  # C01
    for prefetch_bytes in (None, 0, 1 << 20):
        ranks(2).run(_equal_neighbours, prefetch_bytes)


def _equal_stack(layers, config):
    twins = SideBySide(lambda: linears(layers), config=config)
    with late_collectives(), poisoned_memory():
        for step in range(4):
            twins.step(inputs(step, 3, 16))


def test_a_stack_of_equal_layers_is_right_at_every_budget(ranks):  # C01, with more neighbours
    one = 16 * 16 * 4
    for prefetch, keep in [(None, 0), (0, 0), (one, 0), (2 * one, one), (9 * one, 4 * one), (0, 9 * one)]:
        ranks(2).run(_equal_stack, 6, gtp.GTPConfig(prefetch_bytes=prefetch, keep_bytes=keep))


class HoldsOnTo(torch.autograd.Function):
    """A user's op that keeps the full weight for its backward."""

    @staticmethod
    def forward(ctx, x, full):
        ctx.save_for_backward(full)
        return x @ full.t()

    @staticmethod
    def backward(ctx, dy):
        (full,) = ctx.saved_tensors
        return dy @ full, None


def _reader_outlives_the_gemm():
    sharded = linears(6)
    expected = [layer.weight.detach().clone() for layer in sharded]
    for weight in expected:
        dist.broadcast(weight, 0)
    runtime = gtp.shard_model(sharded, dist.group.WORLD)
    x = torch.ones(2, 16, requires_grad=True)
    sharded(x).sum().backward()  # learned: the next forwards prefetch
    held, views = [], []
    leaf = torch.ones(2, 16, requires_grad=True)

    def hold(module, args):
        full = module.weight.materialize_group_for_forward()
        held.append(HoldsOnTo.apply(leaf, full))
        views.append(full[1:3])

    handles = [layer.register_forward_pre_hook(hold) for layer in sharded]
    with late_collectives():
        sharded(x).sum().backward()
    for handle in handles:
        handle.remove()
    with late_collectives():
        sharded(x).sum().backward()
    for view, weight in zip(views, expected, strict=True):
        assert torch.equal(view, weight[1:3])
    for output, weight in zip(held, expected, strict=True):
        (dx,) = torch.autograd.grad(output.sum(), leaf)
        assert torch.equal(dx, torch.ones(2, 16) @ weight)
    held.clear()
    views.clear()
    runtime.release()


def test_views_and_saved_tensors_keep_a_buffer_from_being_reused(ranks):
    ranks(2).run(_reader_outlives_the_gemm)


# docs/GTP_introduction.md, Memory. Gathered weights: four ahead, the one in use, one spare. Wgrads: four in flight, the
# one being written, one spare; and what the exchange receives, one per wgrad in flight. And two in each pool for what
# gloo's threads let go of too late, on a busy machine, to be taken again.
LATE = 2
GATHERED, WGRADS, RECEIVED = 6 + LATE, 6 + LATE, 5


def _full_weights_alive(layers):
    """Full-size storages at the end of forward, in the middle of backward and after it, in a learned step."""
    model = linears(layers, WIDTH)
    runtime = gtp.shard_model(model, dist.group.WORLD)
    x = inputs(0, 2, WIDTH)[rank()]
    counts = {}

    def in_backward(module, args, output):
        output.register_hook(lambda _: counts.update(backward=live_count(FULL, GATHERED + WGRADS + RECEIVED)))

    for _ in range(2):
        model(x).pow(2).mean().backward()
    model.zero_grad()
    middle = model[layers // 2].register_forward_hook(in_backward)
    with saved_tensors() as saved:
        loss = model(x).pow(2).mean()
    counts["forward"] = live_count(FULL, GATHERED + WGRADS)
    counts["saved"] = len(saved.storages(FULL))
    loss.backward()
    middle.remove()
    counts["after"] = live_count(FULL, GATHERED + WGRADS)
    runtime.release()
    counts["released"] = live_count(FULL, 0)
    with torch.no_grad():
        model(x)
        model(x)
    counts["evaluated"] = live_count(FULL, GATHERED)
    runtime.release()
    return counts


def test_live_full_weights_do_not_depend_on_depth(ranks):  # C05
    for layers in (8, 16):
        for count in ranks(2).run(_full_weights_alive, layers):
            assert count["saved"] == count["released"] == 0
            assert count["forward"] <= GATHERED + WGRADS
            assert count["backward"] <= GATHERED + WGRADS + RECEIVED
            assert count["after"] <= GATHERED + WGRADS
            assert count["evaluated"] <= GATHERED


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.layer(self.layer(x)))


def _repeated_layer():
    model = Loop()
    runtime = gtp.shard_model(model, dist.group.WORLD)
    optimizer = sgd(model.parameters())
    counts = []
    for step in range(12):
        model(inputs(step, 2, WIDTH)[rank()]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            counts.append(live_count(FULL, 8))
    runtime.release()
    return counts, live_count(FULL, 0)


def test_a_layer_used_three_times_a_step_does_not_grow_the_pools(ranks):  # C04
    for counts, released in ranks(2).run(_repeated_layer):
        assert max(counts) <= 8
        assert released == 0


def _freed(collect):
    model = nn.Sequential(nn.Embedding(40, 16), nn.LayerNorm(16), *linears(3, bias=True))
    runtime = gtp.shard_model(model, dist.group.WORLD)
    optimizer = sgd(model.parameters())
    for step in range(3):
        model(_ids(step)[0] % 40).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    alive = {
        "weights": weakref.WeakSet(model.parameters()),
        "runtime": weakref.WeakSet([runtime]),
        "pools": weakref.WeakSet(runtime._pools),
        "transport": weakref.WeakSet([runtime.transport]),
        "shards": weakref.WeakSet(member.shard for group in runtime.groups for member in group.members),
    }
    gc.disable()
    try:
        del model, runtime, optimizer
        if collect:
            gc.collect()
        return settled(
            lambda: {name: len(objects) for name, objects in alive.items()}, lambda left: not any(left.values())
        )
    finally:
        gc.enable()


def test_a_deleted_model_is_gone_at_once_without_the_garbage_collector(ranks):  # C50
    for left in ranks(2).run(_freed, False):
        assert left == {"weights": 0, "runtime": 0, "pools": 0, "transport": 0, "shards": 0}
    for left in ranks(2).run(_freed, True):
        assert set(left.values()) == {0}


def _ten_builds():
    counts = []
    for build in range(10):
        twins = SideBySide(lambda: linears(3, WIDTH), **ROUNDED)
        for step in range(2):
            twins.step(inputs(10 * build + step, 2, WIDTH))
        del twins
        if build in (0, 9):
            counts.append(live_count(FULL // 2, 0))
    return counts


def test_ten_models_in_one_process_leave_nothing_behind(ranks):  # C50
    for counts in ranks(2).run(_ten_builds):
        assert counts == [0, 0]

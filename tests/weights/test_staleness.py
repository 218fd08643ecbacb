"""A forward computes with what the weights are now, however they were written, whatever was prefetched before.

Every way of writing a weight is tried at a moment when copies of it are, or are about to be, in flight.
"""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.collectives import late_collectives
from gtp.testing.ranks import rank, subgroup, world_size
from tests.reference import assert_same_parameters, data_parallel_backward, full
from tests.weights.side_by_side import SideBySide, inputs, linears, square

CONFIGS = {
    "default": gtp.GTPConfig(),
    "no_prefetch": gtp.GTPConfig(prefetch_bytes=0),
    "everything_kept": gtp.GTPConfig(prefetch_bytes=1 << 20, keep_bytes=1 << 20),
    "cast_to_bf16": gtp.GTPConfig(param_dtype=torch.bfloat16),
}


# Each writes `value` into a weight, sharded or not: a scalar, so that shard and full weight are written alike.
def _fill(weight, value):
    with torch.no_grad():
        weight.fill_(value)


def _copy(weight, value):
    with torch.no_grad():
        weight.copy_(torch.full_like(weight, value))


def _data_in_place(weight, value):
    weight.data.fill_(value)


def _data_copy(weight, value):
    weight.data.copy_(torch.full_like(weight, value).data)


def _data_replaced(weight, value):
    weight.data = torch.full(weight.shape, value, dtype=weight.dtype)


def _detached(weight, value):
    weight.detach().fill_(value)


def _inplace_operators(weight, value):
    with torch.no_grad():
        weight *= 0.0
        weight += value


def _foreach(weight, value):
    with torch.no_grad():
        torch._foreach_zero_([weight])
        torch._foreach_add_([weight], value)


def _out(weight, value):
    with torch.no_grad():
        torch.mul(torch.ones_like(weight), value, out=weight)


def _lerp(weight, value):
    with torch.no_grad():
        weight.lerp_(torch.full_like(weight, value), 1.0)


WRITERS = [
    _fill, _copy, _data_in_place, _data_copy, _data_replaced, _detached, _inplace_operators, _foreach, _out, _lerp,
]  # fmt: skip


class Written(nn.Sequential):
    """Writes the weight of a later layer in the middle of its forward, when that layer is prefetched already."""

    writer = None
    value = 0.0

    def forward(self, x):
        for index, layer in enumerate(self):
            if index == 1 and self.writer is not None:
                self.writer(self[3].weight, self.value)
            x = layer(x)
        return x


def _model():
    return Written(*[nn.Linear(16, 16, bias=False) for _ in range(5)])


def _forwards_after_writes(config_name, where):
    config = CONFIGS[config_name]
    torch.manual_seed(7)
    plain = _model()
    sharded = copy.deepcopy(plain)
    gtp.shard_model(sharded, dist.group.WORLD, config=config)
    dtype = config.param_dtype or torch.float32
    x = torch.ones(2, 16, dtype=dtype, requires_grad=True)

    plain = plain.to(dtype)  # the values that are written are exact in bf16
    for _ in range(2):
        sharded(x).sum().backward()
    with late_collectives():
        for number, writer in enumerate(WRITERS):
            value = (number + 1) / 8
            for model in (plain, sharded):
                if where == "between":
                    writer(model[3].weight, value)
                else:
                    model.writer, model.value = writer, value
            got, wanted = sharded(x), plain(x)
            assert torch.equal(got, wanted), writer.__name__
            if where == "between":
                got.sum().backward()
            with torch.no_grad():
                assert torch.equal(sharded(x), wanted), writer.__name__


@pytest.mark.parametrize("where", ["between", "inside"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_way_of_writing_a_weight_is_seen_by_the_next_use(ranks, config, where):
    ranks(2).run(_forwards_after_writes, config, where)


def _large_steps():
    twins = SideBySide(lambda: linears(5), optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    with late_collectives():
        for step in range(6):
            twins.step(inputs(step, 3, 16))


def test_large_steps_under_late_collectives(ranks):  # C06
    ranks(2).run(_large_steps)


def _published_by_a_thread(register_before):
    """World 4: GTP groups {0,1}, {2,3}; an outer data-parallel update arrives from a thread that a hook joins."""
    pairs = [subgroup((0, 1)), subgroup((2, 3))]
    outer = [subgroup((0, 2)), subgroup((1, 3))]
    mine, across = pairs[rank() // 2], outer[rank() % 2]
    torch.manual_seed(7)
    plain = linears(5)
    sharded = copy.deepcopy(plain)
    writer: list[threading.Thread] = []
    joined = []

    def ready(module, args):
        joined.append(len(writer))
        while writer:
            writer.pop().join()

    if register_before:
        sharded.register_forward_pre_hook(ready)
    gtp.shard_model(sharded, mine)
    if not register_before:
        sharded.register_forward_pre_hook(ready)
    for step in range(6):
        every = inputs(step, 3, 16)
        data_parallel_backward(plain, every, square)
        with late_collectives():
            loss = square(sharded, every[rank()])
            loss.backward()
        updates = []
        for weight, reference in zip(sharded.parameters(), plain.parameters(), strict=True):
            grad = weight.grad.detach().as_subclass(torch.Tensor)
            dist.all_reduce(grad, group=across)
            shard = weight.detach()
            updates.append((shard, shard - 0.5 * grad / 2))
            with torch.no_grad():
                reference -= 0.5 * reference.grad
            weight.grad = reference.grad = None

        def publish(updates=updates):
            for shard, value in updates:
                time.sleep(0.01)
                shard.copy_(value)

        writer.append(threading.Thread(target=publish))
        writer[0].start()
    ready(None, None)
    # 4 ranks are added in another order than the reference's
    assert_same_parameters(sharded, plain, rtol=1e-5, atol=1e-6)
    assert joined[1:6] == [1] * 5


@pytest.mark.parametrize("register_before", [True, False], ids=["hook_before_sharding", "hook_after_sharding"])
def test_no_shard_is_read_before_a_hook_has_said_that_it_is_ready(ranks, register_before):  # C06, variant
    ranks(4).run(_published_by_a_thread, register_before)


def _master_weights(prefetch_bytes):
    torch.manual_seed(7)
    plain = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)])
    sharded = copy.deepcopy(plain)
    config = gtp.GTPConfig(param_dtype=torch.bfloat16, prefetch_bytes=prefetch_bytes)
    gtp.shard_model(sharded, dist.group.WORLD, config=config)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, sharded)]
    losses = []
    for _ in range(10):
        every = [x.bfloat16() for x in inputs(0, 4, 32)]
        compute = copy.deepcopy(plain).bfloat16()
        grads = []
        for x in every:
            loss = square(compute, x)
            grads.append(torch.autograd.grad(loss, list(compute.parameters())))
            if len(grads) == rank() + 1:
                expected = loss.detach()
        for parameter, *of_ranks in zip(plain.parameters(), *grads, strict=True):
            parameter.grad = sum(g.float() for g in of_ranks) / len(of_ranks)
        loss = square(sharded, every[rank()])
        loss.backward()
        assert torch.equal(loss.detach(), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for layer, reference in zip(sharded, plain, strict=True):
            assert torch.equal(full(layer.weight), reference.weight)
            assert layer.weight.dtype is torch.float32
            computed = layer.weight.materialize_group_for_forward()
            assert torch.equal(computed, reference.weight.bfloat16())
        losses.append(loss.item())
    return losses


def test_compute_copies_follow_their_masters(ranks):  # C07
    for prefetch_bytes in (None, 0):
        for losses in ranks(2).run(_master_weights, prefetch_bytes):
            assert losses[-1] < 0.9 * losses[0]


def _loads():
    twins = SideBySide(lambda: nn.Sequential(*linears(3, bias=True)))
    for step in range(2):
        twins.step(inputs(step, 3, 16))
    torch.manual_seed(99)
    other = nn.Sequential(*linears(3, bias=True)).state_dict()
    before = {name: full(p).clone() for name, p in twins.sharded.named_parameters()}
    with pytest.raises(gtp.UnsupportedError, match=r"assign=True\) would put plain tensors.*load with assign=False"):
        twins.sharded.load_state_dict(other, assign=True)
    for name, parameter in twins.sharded.named_parameters():
        assert torch.equal(full(parameter), before[name])
    for model in (twins.plain, twins.sharded):
        model.load_state_dict(other)
    twins.check_parameters()
    for step in range(2):
        twins.step(inputs(10 + step, 3, 16))


def test_loaded_weights_are_used_and_assigning_them_is_refused(ranks):  # C09
    ranks(2).run(_loads)


def _ema_swap():
    """Weights swapped for averaged ones to evaluate, and back, as diffusion training does."""
    twins = SideBySide(lambda: linears(4))
    averages = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (twins.plain, twins.sharded)]
    for step in range(4):
        twins.step(inputs(step, 3, 16))
        outputs = []
        for model, average in zip((twins.plain, twins.sharded), averages, strict=True):
            trained = {}
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter.detach(), 0.5)
                trained[name] = parameter.data.clone()
                parameter.data.copy_(average[name])
            with torch.no_grad():
                outputs.append(model(inputs(0, 3, 16)[0]))
            for name, parameter in model.named_parameters():
                parameter.data.copy_(trained[name])
        assert torch.equal(*outputs)


def test_averaged_weights_swapped_in_to_evaluate_and_out_again(ranks):
    ranks(2).run(_ema_swap)


def _writes_between_forward_and_backward():
    sharded = linears(3)
    gtp.shard_model(sharded, dist.group.WORLD)
    for _ in range(2):
        sharded(torch.ones(2, 16)).sum().backward()
    y = sharded(torch.ones(2, 16))
    with torch.no_grad():
        sharded[2].weight.add_(1.0)
    with pytest.raises(gtp.GTPStateError, match=r"'2.weight'.*changed in place between its forward and this backward"):
        y.sum().backward()
    assert world_size() == 2


def test_a_weight_written_between_forward_and_backward_is_named(ranks):
    ranks(2).run(_writes_between_forward_and_backward)

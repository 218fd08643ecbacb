"""Gradients on their way: what `no_sync` holds, backwards that fail at their end, buffers that are lent, hooks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.runtime.held import MarkedGradient
from gtp.testing.ranks import rank
from tests.reference import data_parallel_backward
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square


def _model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def _touched_while_held(touch):
    """What happens between a held backward and the next must not decide what is reduced."""
    twins = SideBySide(_model, **ROUNDED)
    with twins.runtime.no_sync():
        square(twins.sharded, inputs(0, 3, 8)[rank()]).backward()
    touch(list(twins.sharded.parameters()))
    square(twins.sharded, inputs(1, 3, 8)[rank()]).backward()
    for step in range(2):
        _reference(twins, step)
    twins.check_gradients()
    twins.update()
    assert all(type(p.grad) is not MarkedGradient for p in twins.sharded.parameters())


def _reference(twins, step):
    data_parallel_backward(twins.plain, inputs(step, 3, 8), square)


def _clip(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 1e9)


def _scale(parameters):
    for parameter in parameters:
        parameter.grad.mul_(1.0)


def _assign(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad


def _copy(parameters):
    for parameter in parameters:
        copy.deepcopy(parameter.grad).zero_()


@pytest.mark.parametrize("touch", [_clip, _scale, _assign, _copy])
def test_gradients_that_no_sync_holds_survive_what_does_not_zero_them(ranks, touch):
    ranks(2).run(_touched_while_held, touch)


def _zero(grad):
    grad.zero_()


def _fill(grad):
    grad.fill_(0.0)


def _zero_list(grad):
    torch._foreach_zero_([grad])


def _zero_data(grad):
    grad.data.zero_()


def _zero_alias(grad):
    grad.detach().zero_()


def _zeroed_in_place(zero):
    twins = SideBySide(_model, **ROUNDED)
    with twins.runtime.no_sync():
        square(twins.sharded, inputs(0, 3, 8)[rank()]).backward()
    for parameter in twins.sharded.parameters():
        zero(parameter.grad)
    square(twins.sharded, inputs(1, 3, 8)[rank()]).backward()
    _reference(twins, 1)
    twins.check_gradients()


@pytest.mark.parametrize("zero", [_zero, _fill, _zero_list, _zero_data, _zero_alias])
def test_every_way_of_zeroing_drops_what_no_sync_holds(ranks, zero):
    ranks(2).run(_zeroed_in_place, zero)


def _held_on_one_rank_only():
    """Rows of an embedding that belong to rank 0 have a gradient: rank 1 sees zeros, and holds what rank 0 holds."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    runtime = gtp.shard_model(model, dist.group.WORLD)
    table = model[0].weight
    model(torch.tensor([0, 1])).sum().backward()
    wanted = 2 * table.grad.full_tensor()
    wanted[6] += wanted[0] / 2
    with runtime.no_sync():
        model(torch.tensor([0, 1, 6])).sum().backward()
    _scale(list(model.parameters()))
    model[1](torch.ones(2, 4)).sum().backward()  # does not use the table: what is held is sent all the same
    torch.testing.assert_close(table.grad.full_tensor(), wanted)


def test_ranks_agree_about_a_held_gradient_that_is_zero_on_one_of_them(ranks):
    ranks(2).run(_held_on_one_rank_only)


def _hook_on_one_rank():
    twins = SideBySide(_model)
    seen = []
    if rank() == 0:
        twins.sharded[0].bias.register_hook(lambda g: seen.append(g.clone()))
    for step in range(2):
        twins.step(inputs(step, 3, 8))
    return len(seen)


def test_a_hook_on_one_rank_only_changes_nothing_for_the_others(ranks):
    assert ranks(2).run(_hook_on_one_rank) == [2, 0]


def _shared_by_two_models():
    norm = nn.LayerNorm(4)
    kept, seen = nn.Sequential(nn.Linear(4, 4), norm), []
    removed = norm.bias.register_hook(lambda g: seen.append("removed"))
    norm.bias.register_hook(lambda g: seen.append(g.clone()))
    runtime = gtp.shard_model(kept, dist.group.WORLD)
    removed.remove()  # registered before the model was sharded
    with pytest.raises(gtp.GTPStateError, match=r"1\.weight is a parameter of another sharded model"):
        gtp.shard_model(nn.Sequential(nn.Linear(4, 4), norm), dist.group.WORLD)
    del kept, runtime
    again = nn.Sequential(nn.Linear(4, 4), norm)
    gtp.shard_model(again, dist.group.WORLD, config=gtp.GTPConfig(grad_reduce="sum"))
    again(torch.ones(2, 4)).sum().backward()
    assert norm.bias.grad.tolist() == [4.0] * 4  # two rows on two ranks
    assert [g.tolist() for g in seen] == [[4.0] * 4]


def test_a_parameter_belongs_to_one_sharded_model_at_a_time(ranks):
    ranks(2).run(_shared_by_two_models)


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return (self.linear(x) * self.phase).abs()


def _complex():
    twins = SideBySide(_Complex, **ROUNDED)
    for step in range(2):
        twins.step(inputs(step, 3, 4))
    with twins.runtime.no_sync():
        square(twins.sharded, inputs(2, 3, 4)[rank()]).backward()
    square(twins.sharded, inputs(3, 3, 4)[rank()]).backward()
    for step in (2, 3):
        data_parallel_backward(twins.plain, inputs(step, 3, 4), square)
    twins.check_gradients()


def test_complex_parameters_are_reduced(ranks):
    ranks(2).run(_complex)


def _fails_at_the_end(where):
    """The transport is out of memory, or the user loses patience, when a backward waits for its last reductions."""
    twins = SideBySide(_model)
    twins.step(inputs(0, 3, 8))
    transport, count = twins.runtime.transport, [0]
    real = getattr(transport, where)

    def failing(*args):
        count[0] += 1
        real(*args)
        if count[0] == 1:
            raise KeyboardInterrupt

    setattr(transport, where, failing)
    with pytest.raises(KeyboardInterrupt):
        square(twins.sharded, inputs(1, 3, 8)[rank()]).backward()
    setattr(transport, where, real)
    twins.sharded.zero_grad()
    assert all(p.grad is None for p in twins.sharded.parameters())
    for step in range(2, 4):
        twins.step(inputs(step, 3, 8))
    assert twins.runtime._pools.wgrads.leased_bytes == 0


@pytest.mark.parametrize("where", ["finish_reduce", "start_all_reduce", "finish_all_reduce", "close"])
def test_the_step_after_a_backward_that_failed_at_its_end_is_right(ranks, where):  # C48
    ranks(2).run(_fails_at_the_end, where)


def _lent_and_forgotten():
    """Buffers that nobody finalizes are no leak, and one that comes back transposed is read as it looks."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    runtime = gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(grad_reduce="sum"))
    weight = model[0].weight
    wgrad = torch.arange(64.0).view(8, 8)
    for _ in range(3):
        weight.grad_buffer()
        model(torch.ones(2, 8)).sum().backward()
        assert runtime._pools.wgrads.leased_bytes == 0
        weight.grad = None
    for view in (lambda b: b, lambda b: b.t()):
        buffer = weight.grad_buffer()
        view(buffer).copy_(wgrad)
        weight.finalize_group_grads(view(buffer))
        assert torch.equal(weight.grad.full_tensor(), 2 * wgrad)
        weight.grad = None
        del buffer
        runtime.release()
        assert runtime._pools.wgrads.leased_bytes == 0


def test_buffers_that_are_lent_and_forgotten_or_returned_transposed(ranks):
    ranks(2).run(_lent_and_forgotten)


class _Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))

    def weight_groups(self):
        return [["a", "b"]]


def _one_of_a_group_is_held():
    """`no_sync` held a gradient, and the user dropped that of one weight of the group: the wire carries one dtype."""
    model = _Pair().bfloat16()
    runtime = gtp.shard_model(model, dist.group.WORLD, include=["a", "b"])
    ones = torch.ones(4, 4, dtype=torch.bfloat16)
    seen, start = [], runtime.transport.start_reduce

    def look(group, wgrads, *rest):
        seen.append({wgrad.dtype for wgrad in wgrads})
        return start(group, wgrads, *rest)

    runtime.transport.start_reduce = look
    with runtime.no_sync():
        model.a.finalize_group_grads([ones, 2 * ones])
    model.b.grad = None
    model.a.finalize_group_grads([4 * ones, 8 * ones])
    assert seen == [{torch.float32}]
    assert [p.grad.full_tensor().unique().tolist() for p in (model.a, model.b)] == [[5.0], [8.0]]


def test_a_group_of_which_one_gradient_is_held_is_reduced_in_one_dtype(ranks):
    ranks(2).run(_one_of_a_group_is_held)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def _released_and_zeroed():
    """The recipe of the introduction. Additions come as late as a stream may: when the current one waits for them."""
    twins = SideBySide(_model)
    twins.backward(inputs(0, 3, 8))
    handle = twins.sharded[1].register_forward_hook(lambda module, args, output: _Raises.apply(output))
    with pytest.raises(MemoryError):
        square(twins.sharded, inputs(1, 3, 8)[rank()]).backward()
    handle.remove()
    assert len(twins.runtime._reducer._in_flight) == 1
    twins.runtime.release()
    for model in (twins.plain, twins.sharded):
        model.zero_grad(set_to_none=False)
    assert len(twins.runtime._reducer._in_flight) == 0
    twins.step(inputs(2, 3, 8))


def test_released_and_zeroed_after_a_backward_that_raised(ranks):  # C48
    ranks(2).run(_released_and_zeroed)


def _gradient_laid_out_otherwise():
    """The user's own `.grad` lies in memory column by column. Transports write contiguous memory."""
    twins = SideBySide(_model, **ROUNDED)
    transport, seen = twins.runtime.transport, []
    start = transport.start_reduce

    def look(group, wgrads, into, *rest):
        seen.extend(target.is_contiguous() for target in into)
        return start(group, wgrads, into, *rest)

    transport.start_reduce = look
    for parameter in twins.sharded.parameters():
        if isinstance(parameter, gtp.GTPWeight):
            by_column = torch.ones(parameter.shape[::-1]).t()
            assert by_column.stride() == (1, parameter.shape[0])
            parameter.grad = by_column
        else:
            parameter.grad = torch.ones_like(parameter)
    for parameter in twins.plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in range(2):
        twins.backward(inputs(step, 3, 8))
    assert seen == [True] * 4


def test_a_gradient_of_the_users_that_is_not_contiguous_is_added_to(ranks):
    ranks(2).run(_gradient_laid_out_otherwise)

"""After an exception, a deletion, or a second model, the next step is right and memory is what it was."""

from __future__ import annotations

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.modules import GroupedLinear
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.memory import poisoned_memory
from gtp.testing.ranks import rank
from tests.reference import full
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, live_count, square

WIDTH = 32
FULL = WIDTH * WIDTH * 4


class Fragile(nn.Module):
    """Six layers; the one at `fail_at` raises in forward, in recomputation or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.fail: tuple[int, str] | None = None
        self.reentrant: bool | None = None
        self.calls = 0

    def body(self, index: int, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        where = self.fail[1] if self.fail is not None and self.fail[0] == index else None
        if where == "forward" or (where == "recompute" and self.calls > 6):
            raise MemoryError("a simulated out of memory")
        y = torch.tanh(self.layers[index](x))
        if where == "backward" and y.requires_grad:  # reentrant checkpointing runs forward without grad mode
            y.register_hook(_raise)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 0
        for index in range(6):
            if self.reentrant is None:
                x = self.body(index, x)
            else:
                x = checkpoint(self.body, index, x, use_reentrant=self.reentrant)
        return x


def _raise(grad):
    raise MemoryError("a simulated out of memory")


def _retry(where, reentrant, keep_bytes):
    twins = SideBySide(Fragile, config=gtp.GTPConfig(keep_bytes=keep_bytes))
    twins.sharded.reentrant = reentrant

    def with_grad(x):
        return x.requires_grad_(reentrant is True)  # reentrant checkpointing wants an input with a gradient

    with late_collectives():
        for step in range(2):
            twins.step([with_grad(x) for x in inputs(step, 4, WIDTH)])
        twins.sharded.fail = (3, where)
        with pytest.raises(MemoryError, match="simulated"):
            square(twins.sharded, with_grad(inputs(2, 4, WIDTH)[rank()])).backward()
        twins.sharded.fail = None
        twins.sharded.zero_grad()
        twins.runtime.release()
        # the reference holds six full weights of its own
        alive = live_count(FULL, 6) - 6
        twins.step([with_grad(x[:2]) for x in inputs(2, 4, WIDTH)])
        for step in range(3, 5):
            twins.step([with_grad(x) for x in inputs(step, 4, WIDTH)])
    return alive


@pytest.mark.parametrize(
    "where, reentrant",
    [("forward", None), ("backward", None), ("recompute", True), ("recompute", False), ("backward", True)],
)
def test_an_exception_then_half_the_batch(ranks, where, reentrant):  # C48
    for keep_bytes in (0, 1 << 20):
        assert ranks(2).run(_retry, where, reentrant, keep_bytes) == [0, 0]


def _accumulation_interrupted(set_to_none, no_sync):
    """The second micro-batch raises in backward; the user zeroes gradients and goes on, as with plain torch."""
    twins = SideBySide(Fragile, **ROUNDED)
    with late_collectives():
        twins.step(inputs(0, 4, WIDTH))
        for model in (twins.plain, twins.sharded):
            square(model, inputs(1, 4, WIDTH)[rank()]).backward()
        twins.sharded.fail = (2, "backward")
        with pytest.raises(MemoryError):
            square(twins.sharded, inputs(2, 4, WIDTH)[rank()]).backward()
        twins.sharded.fail = None
        for model in (twins.plain, twins.sharded):
            # biases before weights: nothing of the runtime runs between the exception and their zeroing
            for parameter in sorted(model.parameters(), key=lambda p: p.dim()):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        if no_sync:
            with twins.runtime.no_sync():
                twins.sharded(inputs(3, 4, WIDTH)[rank()]).sum().mul(0).backward()
        twins.step(inputs(4, 4, WIDTH))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradients_stay_zeroed_after_a_backward_that_raised(ranks, set_to_none):
    ranks(2).run(_accumulation_interrupted, set_to_none, False)
    ranks(2).run(_accumulation_interrupted, set_to_none, True)


def _replicated_gradient_restored():
    """A backward that raises leaves a replicated parameter's gradient as the last whole backward left it."""
    twins = SideBySide(Fragile)
    twins.backward(inputs(0, 4, WIDTH))
    before = [p.grad.clone() for p in twins.sharded.parameters() if not isinstance(p, gtp.GTPWeight)]
    twins.sharded.fail = (2, "backward")
    with pytest.raises(MemoryError):
        square(twins.sharded, inputs(1, 4, WIDTH)[rank()]).backward()
    after = [p.grad for p in twins.sharded.parameters() if not isinstance(p, gtp.GTPWeight)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_replicated_gradients_are_restored_while_the_exception_flies(ranks):
    ranks(2).run(_replicated_gradient_restored)


def _hook_raises():
    """A post-accumulate hook that raises: gradients are there, and the next step is right."""
    twins = SideBySide(Fragile)
    removable = twins.sharded.layers[2].weight.register_post_accumulate_grad_hook(_raise)
    with pytest.raises(MemoryError):
        square(twins.sharded, inputs(0, 4, WIDTH)[rank()]).backward()
    removable.remove()
    twins.sharded.zero_grad()
    twins.step(inputs(1, 4, WIDTH))


def test_a_hook_that_raises(ranks):
    ranks(2).run(_hook_raises)


def _interrupts():
    """KeyboardInterrupt and SystemExit pass through too, at any layer, any number of times in a row."""
    twins = SideBySide(Fragile)
    for error in (KeyboardInterrupt, SystemExit, StopIteration):
        for layer in (0, 5):

            def hook(module, args, output, error=error):
                raise error

            handle = twins.sharded.layers[layer].register_forward_hook(hook)
            for _ in range(2):
                with pytest.raises((error, RuntimeError)):
                    twins.sharded(inputs(0, 4, WIDTH)[rank()])
            with torch.no_grad(), pytest.raises((error, RuntimeError)):
                twins.sharded(inputs(0, 4, WIDTH)[rank()])
            handle.remove()
        twins.step(inputs(1, 4, WIDTH))


def test_interrupts_at_any_layer(ranks):
    ranks(2).run(_interrupts)


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 24))


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 1))


def _adversaries():
    """Two sharded models in one graph, by turns, one optimizer each; one dies and another is born."""
    p, q = SideBySide(Generator, **ROUNDED), SideBySide(Critic, **ROUNDED)
    pairs = [(p.plain, q.plain), (p.sharded, q.sharded)]
    with late_collectives():
        for step in range(4):
            noise, real = inputs(step, 3, 8), inputs(100 + step, 3, 24)
            q.step(
                [torch.cat([_without_grad(p.plain, z), x]) for z, x in zip(noise, real, strict=True)],
                lambda critic, x: critic(x).pow(2).mean(),
            )
            q.plain.requires_grad_(False)
            q.sharded.requires_grad_(False)
            p.backward(noise, lambda generator, z: _critic_of(generator, pairs)(generator(z)).mean())
            p.update()
            q.plain.requires_grad_(True)
            q.sharded.requires_grad_(True)
    dead = weakref.WeakSet([*p.sharded.parameters(), p.runtime])
    pairs.clear()
    del p
    assert len(dead) == 0
    with collective_log() as log:
        p2 = SideBySide(lambda: nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 24)), **ROUNDED)
        for step in range(2):
            p2.step(inputs(step, 3, 8))
            q.step(inputs(200 + step, 3, 24))
    shapes = {record.shape for record in log.started("all_gather_into_tensor")} - {(2,)}
    assert shapes == {(40, 8), (24, 40), (16, 24), (2, 16)}  # those of P2 and Q: (1, 16) is padded to two ranks


def _without_grad(model, x):
    with torch.no_grad():
        return model(x)


def _critic_of(generator, pairs):
    return next(critic for g, critic in pairs if g is generator)


def test_two_models_by_turns_and_a_third_after_one_died(ranks):  # C50
    ranks(2).run(_adversaries)


def _frozen_reference():
    """A training model and a frozen reference copy of it, in the same loss, as preference training has them."""
    trained = SideBySide(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)))
    reference = SideBySide(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), optimizer=None)
    for model in (reference.plain, reference.sharded):
        model.requires_grad_(False)
    start = [full(p).clone() for p in reference.sharded.parameters()]

    def loss(model, x):
        with torch.no_grad():
            wanted = (reference.sharded if model is trained.sharded else reference.plain)(x)
        return (model(x) - wanted - 1).pow(2).mean()

    with late_collectives():
        for step in range(4):
            trained.step(inputs(step, 3, 16), loss)
    assert all(torch.equal(full(p), s) for p, s in zip(reference.sharded.parameters(), start, strict=True))
    assert all(p.grad is None for p in reference.sharded.parameters())


def test_a_frozen_copy_beside_the_model_that_trains(ranks):  # C50
    ranks(2).run(_frozen_reference)


def _released():
    """`release` at any moment between steps gives memory back and changes no number."""
    twins = SideBySide(Fragile)
    for step in range(4):
        twins.step(inputs(step, 4, WIDTH))
        twins.runtime.release()
        assert twins.runtime._pools.gathers.reserved_bytes == 0
        assert twins.runtime._pools.wgrads.reserved_bytes == 0
    with twins.runtime.no_sync():
        square(twins.sharded, inputs(9, 4, WIDTH)[rank()]).backward()
    assert twins.runtime.stats().unreduced_bytes > 0
    twins.runtime.release()
    assert twins.runtime.stats().unreduced_bytes == 0
    twins.step(inputs(5, 4, WIDTH))  # what no_sync held is gone, weights and biases alike
    gc.collect()


def test_release_changes_no_number_and_drops_what_no_sync_held(ranks):
    ranks(2).run(_released)


def _backward_without_model():
    """The model is deleted between forward and backward: the graph keeps what it needs, and nothing leaks."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    gtp.shard_model(model, dist.group.WORLD)
    x = torch.ones(2, 16, requires_grad=True)
    weights = weakref.WeakSet(model.parameters())
    loss = model(x).sum()
    del model
    assert len(weights) > 0
    loss.backward()
    del loss
    assert x.grad.abs().sum() > 0
    return len(weights)


def test_a_model_deleted_before_its_backward(ranks):
    assert ranks(2).run(_backward_without_model) == [0, 0]


class _Raising(dist.Work):
    """The work of a collective. Raises when `wait` has returned, once, if it is its turn."""

    def __init__(self, work: dist.Work, error: BaseException, turn: list[int]) -> None:
        super().__init__()
        self.work, self.error, self.turn = work, error, turn

    def wait(self, timeout=None):
        self.work.wait()
        self.turn[0] -= 1
        if self.turn[0] == 0:
            raise self.error
        return True


class _TriesAgain(nn.Module):
    """A group of three weights between others, whose layer a user's code calls again when it raises."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.experts, self.down = nn.Linear(8, 12), GroupedLinear(3, 12, 12), nn.Linear(12, 8)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        try:
            h = self.experts(h, [2, 1, 3])
        except (KeyboardInterrupt, RuntimeError):
            if not self.again:
                raise
            h = self.experts(h, [2, 1, 3])
        return self.down(h)


def _raise_between_waits(error, again):
    twins = SideBySide(lambda: _TriesAgain(again), **ROUNDED)
    # a failure means that the process group is broken: nobody waits for the others
    in_flight = late_collectives() if isinstance(error, KeyboardInterrupt) else contextlib.nullcontext()
    with poisoned_memory(), in_flight:
        real = dist.all_gather_into_tensor
        for turn in range(1, 6):
            twins.step(inputs(2 * turn, 6, 8))
            left = [turn]  # all ranks raise, or gather again, at the same place

            def gather(*args, left=left, **kwargs):
                work = real(*args, **kwargs)
                return _Raising(work, error, left) if kwargs.get("async_op") else work

            with mock.patch.object(dist, "all_gather_into_tensor", gather):
                if again and 2 <= turn <= 4:
                    twins.step(inputs(2 * turn + 1, 6, 8))
                else:
                    with pytest.raises(type(error)):
                        square(twins.sharded, inputs(1, 6, 8)[rank()])
            assert left[0] <= 0
        twins.step(inputs(20, 6, 8))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a simulated failure")], ids=["interrupt", "failure"]
)
def test_an_error_between_the_waits_for_a_group(ranks, error, again):
    """Of its gathers one after the other is waited for. What has not arrived is never computed with, and an interrupt
    leaves none in flight."""
    ranks(2).run(_raise_between_waits, error, again)

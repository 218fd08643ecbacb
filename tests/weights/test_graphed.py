"""`gtp.make_graphed_callables`: what happens while layers are captured. Replays need a GPU: test_graphed_gpu.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.testing.collectives import late_collectives
from gtp.testing.ranks import rank
from tests.reference import assert_same_gradients, data_parallel_backward, full_grad

WARMUPS = 3
TIMES = WARMUPS + 2


class Block(nn.Module):
    def __init__(self, width: int = 8, *, twice: bool = False, recomputed: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width)
        self.extra = nn.Linear(width, width)
        self.twice, self.recomputed = twice, recomputed
        self.uses_extra = True

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        y = x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x))
        y = self.out(y)
        if self.uses_extra:
            y = self.extra(y)
        return self.out(y) if self.twice else y


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Capture:
    """Stands for `torch.cuda.make_graphed_callables`: the forwards and backwards that it runs, in its order, twice.

    Outputs and gradients must be those of the plain model's blocks, gradients in the mean over ranks.
    """

    def __init__(self, config=None, **options):
        torch.manual_seed(0)
        self.plain, self.sharded = Model(**options), Model(**options)
        self.sharded.load_state_dict(self.plain.state_dict())
        self.exact = not options.get("twice")  # two uses are added over ranks first, or over uses
        self.runtime = gtp.shard_model(self.sharded, dist.group.WORLD, config=config or gtp.GTPConfig())
        generator = torch.Generator().manual_seed(1)
        self.x = [[torch.randn(4, 8, generator=generator).requires_grad_() for _ in range(2)] for _ in range(2)]
        self.parts = []
        self.before = lambda time: None

    def run(self):
        add_part = self.runtime.add_part
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.runtime, "add_part", lambda: self.parts.append(add_part()) or self.parts[-1])
            patch.setattr(torch.cuda, "make_graphed_callables", self)
            blocks = tuple(self.sharded.blocks)
            assert gtp.make_graphed_callables(blocks, tuple((x,) for x in self.x[rank()])) == blocks

    def __call__(self, modules, samples):
        for position, (module, (x,)) in enumerate(zip(modules, samples, strict=True)):
            for time in range(WARMUPS):
                self.before(time)
                self.backward(position, module(x))
        for time in range(WARMUPS, TIMES):
            self.before(time)
            outputs = [module(x) for module, (x,) in zip(modules, samples, strict=True)]
            for position in reversed(range(len(modules))):
                self.backward(position, outputs[position])
        return modules

    def backward(self, position, y):
        block, plain = self.sharded.blocks[position], self.plain.blocks[position]
        assert torch.equal(y, plain(self.x[rank()][position]))
        named = {name: p for name, p in block.named_parameters() if p.requires_grad}
        if not block.uses_extra:
            named = {name: p for name, p in named.items() if not name.startswith("extra")}
        x = self.x[rank()][position]
        grads = torch.autograd.grad(y, [x, *named.values()], torch.ones_like(y))
        plain.zero_grad()
        data_parallel_backward(plain, [xs[position] for xs in self.x], lambda module, value: module(value).sum())
        wanted = dict(plain.named_parameters())
        for (name, parameter), grad in zip(named.items(), grads[1:], strict=True):
            if isinstance(parameter, gtp.GTPWeight):
                mine, theirs = grad[parameter.layout.valid_slice], wanted[name].grad[parameter.layout.shard_slice]
                bound = 0.0 if self.exact else 1e-6 * wanted[name].grad.abs().max().item()
                assert (mine - theirs).abs().max().item() <= bound
            assert parameter.grad is None

    def step(self):
        """An ordinary step, as if nothing had happened."""
        self.plain.zero_grad()
        data_parallel_backward(self.plain, [xs[0] for xs in self.x], lambda module, x: module(x).sum())
        self.sharded(self.x[rank()][0]).sum().backward()
        assert_same_gradients(
            self.sharded, self.plain, rtol=0.0 if self.exact else 1e-6, atol=0.0 if self.exact else 1e-6
        )
        self.sharded.zero_grad()


def _gathered_ahead(options, consumes):
    capture = Capture(**options)
    with late_collectives():
        capture.run()
        capture.step()
    for part in capture.parts:
        for stretch, count, uses in zip((part.forward, part.backward), consumes, (4, 4), strict=True):
            counters = stretch.schedule.counters
            # known from the second time on: gathered before it is asked for, and nothing else is
            assert counters.consumes == TIMES * count
            assert counters.misses <= count
            assert counters.hits >= (TIMES - 1) * count
            assert counters.wrong_guesses == 0
            assert len(stretch.groups) == uses
    assert capture.runtime.stats().consumes == 2 * sum(consumes) + 2  # of the ordinary step, the head's too


@pytest.mark.parametrize(
    "options, consumes",
    [({}, (4, 4)), ({"recomputed": True}, (4, 6))],
    ids=["plain", "recomputed"],
)
def test_what_a_layer_needs_is_gathered_ahead_within_the_layer(ranks, options, consumes):
    ranks(2).run(_gathered_ahead, options, consumes)


def _used_twice():
    capture = Capture(twice=True)
    with late_collectives():
        capture.run()
        capture.step()


def test_a_weight_that_is_used_twice_has_both_gradients(ranks):
    ranks(2).run(_used_twice)


def _weights_change(config):
    capture = Capture(config)

    def before(time):
        with torch.no_grad():
            for model in (capture.plain, capture.sharded):
                for parameter in model.parameters():
                    parameter.mul_(1.5 if time % 2 else 0.5)

    capture.before = before
    with late_collectives():
        capture.run()
        capture.step()


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["shards", "compute copies"])
def test_each_line_of_a_part_sees_the_weights_as_they_are(ranks, dtype):
    ranks(2).run(_weights_change, gtp.GTPConfig(param_dtype=dtype))


def _another_way():
    capture = Capture()

    def before(time):
        for model in (capture.plain, capture.sharded):
            for block in model.blocks:
                block.uses_extra = time >= WARMUPS

    capture.before = before
    with late_collectives():
        capture.run()
        capture.step()
    assert all(len(part.forward.groups) == 4 for part in capture.parts)


def test_a_weight_that_the_warm_up_did_not_use_is_gathered_all_the_same(ranks):
    ranks(2).run(_another_way)


def _raises():
    capture = Capture()
    forwards = [block.forward for block in capture.sharded.blocks]

    def before(time):
        if time == 1:
            raise RuntimeError("out of luck")

    capture.before = before
    with pytest.raises(RuntimeError, match="out of luck"):
        capture.run()
    assert [block.forward for block in capture.sharded.blocks] == forwards
    assert not any("forward" in vars(block) for block in capture.sharded.blocks)
    capture.step()
    # in the middle of a forward
    capture.before = lambda time: None
    handle = capture.sharded.blocks[0].down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture.run()
    handle.remove()
    capture.step()
    capture.run()


def test_after_an_error_the_model_is_what_it_was(ranks):
    ranks(2).run(_raises)


def _forward_waits():
    capture = Capture()
    loss = capture.sharded(capture.x[rank()][0]).sum()
    with pytest.raises(gtp.GTPStateError, match="waits for its backward"):
        capture.run()
    del loss
    capture.runtime.release()
    capture.run()


def test_not_while_a_forward_waits_for_its_backward(ranks):
    ranks(2).run(_forward_waits)


class Replay(torch.autograd.Function):
    """Does to autograd what a graphed layer does: its gradients lie where the next replay writes."""

    @staticmethod
    def forward(ctx, memory, weight):
        ctx.memory = memory
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, _):
        ctx.memory.add_(1.0)
        return None, ctx.memory.detach()


def _replays():
    capture = Capture()
    capture.run()
    capture.run()  # anew: hooks of before are gone
    weight = capture.sharded.blocks[0].out.weight
    called = []
    weight.register_post_accumulate_grad_hook(lambda w: called.append(w.grad.as_subclass(torch.Tensor).sum().item()))
    for _ in range(2):
        memory = torch.zeros_like(weight.shard)
        for replays in range(1, 4):
            Replay.apply(memory, weight).backward()
            assert torch.equal(
                weight.grad.as_subclass(torch.Tensor), torch.full_like(weight.shard, sum(range(replays + 1)))
            )
        weight.grad = None
    assert called == [32.0 * total for total in (1, 3, 6)] * 2
    # elsewhere nothing changes
    called.clear()
    capture.step()
    assert len(called) == 1


def test_gradients_of_replays_add_up_and_hooks_see_them(ranks):
    ranks(2).run(_replays)


def _recomputed_gradients():
    """torch.autograd.grad and backward(inputs=...) run forwards again, which must see weights and not shards."""
    capture = Capture(recomputed=True)
    x = capture.x[rank()][0]
    loss = capture.sharded(x).square().sum()
    capture.plain.zero_grad()
    data_parallel_backward(
        capture.plain, [xs[0] for xs in capture.x], lambda module, value: module(value).square().sum()
    )
    wanted = {name: p.grad for name, p in capture.plain.named_parameters()}
    weights = {n: p for n, p in capture.sharded.named_parameters() if isinstance(p, gtp.GTPWeight)}
    grads = torch.autograd.grad(loss, [*weights.values(), x], retain_graph=True)
    for (name, weight), grad in zip(weights.items(), grads[:-1], strict=True):
        assert torch.equal(grad[weight.layout.valid_slice], wanted[name][weight.layout.shard_slice])
    loss.backward(inputs=[*weights.values()])
    for name, weight in weights.items():
        assert torch.equal(full_grad(weight), wanted[name])
    # a weight that the loss does not use
    for block in capture.sharded.blocks:
        block.uses_extra = False
    extra, out = (getattr(capture.sharded.blocks[0], name).weight for name in ("extra", "out"))
    with pytest.raises(RuntimeError, match="unused"):
        torch.autograd.grad(capture.sharded(x).sum(), [extra, out])
    unused, used, of_x = torch.autograd.grad(capture.sharded(x).sum(), [extra, out, x], materialize_grads=True)
    assert torch.equal(unused, torch.zeros_like(extra.shard))
    assert used.shape == out.shard.shape
    assert used.any()
    assert of_x.shape == x.shape
    extra.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(capture.sharded(x).sum(), [extra])


def test_gradients_that_are_returned_may_need_forwards_again(ranks):
    ranks(2).run(_recomputed_gradients)

"""`unshard=`: full weights live as long as their module's forward, and again in backward; nothing outlives its use."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.collectives import late_collectives
from tests.weights.side_by_side import SideBySide, adamw, inputs, live_count
from tests.weights.unshard_kinds import Conv1D, Experts


def _leased(runtime):
    pool = runtime._pools.gathers
    pool.trim()
    return pool.leased_bytes


def _peak():
    """Of six weights, two are whole at a time, in forward and in backward; none is between them."""
    width = 64
    model = nn.Sequential(*[Experts(4, width, width) for _ in range(3)])
    runtime = gtp.shard_model(model, dist.group.WORLD, unshard="*", config=gtp.GTPConfig(prefetch_bytes=0))
    with late_collectives():  # gloo's threads hold copies, and no lease a moment longer
        loss = model(torch.randn(8, width)).sum()
        between = _leased(runtime)
        loss.backward()
    return between, runtime.stats().peak_leased_bytes / (4 * width * width * 4)


def test_full_weights_are_let_go_between_forward_and_backward(ranks):
    assert ranks(2).run(_peak) == [(0, 2.0)] * 2


def _consumes():
    twins = SideBySide(lambda: nn.Sequential(Experts(), Experts()), optimizer=adamw, unshard="*")
    for step in range(3):
        twins.step(inputs(step, 10, 8))
    return twins.runtime.trace(), twins.runtime.stats().hit_rate


def test_each_weight_is_gathered_once_per_forward_and_once_per_backward_ahead_of_its_use(ranks):
    trace, hits = ranks(2).run(_consumes)[0]
    forward = [name for name, phase in trace if phase == "forward"]
    backward = [name for name, phase in trace if phase == "backward"]
    assert forward == ["0.up", "0.down", "1.up", "1.down"]
    assert backward == ["1.down", "1.up", "0.down"]  # the model's input needs no gradient, so nothing reads 0.up
    assert hits > 0.5


def _leaks():
    model = nn.Sequential(nn.Linear(8, 8), Experts(), Conv1D())
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    gc.collect()
    gc.disable()
    try:
        y = model(torch.randn(4, 8))
        seen = weakref.ref(y)
        y.sum().backward()
        del y
        assert seen() is None
        alive = weakref.ref(model[2])
        del model
        return alive() is None, live_count(5 * 6 * 8 * 4, 0)
    finally:
        gc.enable()


def test_models_and_outputs_go_without_a_collection(ranks):
    assert ranks(2).run(_leaks) == [(True, 0)] * 2


class Views(nn.Module):
    """Saves views of its weight that shape and strides do not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 2) * 0.3)

    def forward(self, x: torch.Tensor, signed: bool = True) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight)
        y = (x.to(weight.dtype) @ weight).real + x[:, :0] @ self.weight[8:, :, 0]  # none of its rows
        return y * weight.conj().imag[0] + x @ weight.conj().imag if signed else y


def _viewed():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Views()), unshard="*", rtol=1e-5, atol=1e-6)
    for step in range(2):
        twins.step(inputs(step, 10, 8))


def test_views_of_a_weight_in_another_dtype_and_with_a_pending_sign_are_what_they_were(ranks):
    ranks(2).run(_viewed)


def _not_held():
    views = Views()
    runtime = gtp.shard_model(views, dist.group.WORLD, unshard="*", config=gtp.GTPConfig(prefetch_bytes=0))
    with late_collectives():
        loss = views(torch.randn(4, 8), signed=False).sum()
        return _leased(runtime), loss.requires_grad


def test_no_such_view_holds_the_full_weight_until_backward(ranks):
    assert ranks(2).run(_not_held) == [(0, True)] * 2


def _refused():
    """Saved-tensor hooks that torch refuses: what was gathered before them goes without a collection."""
    model = nn.Sequential(nn.Linear(8, 8), Conv1D())
    runtime = gtp.shard_model(model, dist.group.WORLD, unshard="*")
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
            with late_collectives(), pytest.raises(RuntimeError, match="no hooks"):
                model(torch.randn(4, 8))
        runtime.release()
        return _leased(runtime)
    finally:
        gc.enable()


def test_a_forward_that_cannot_begin_leaves_nothing(ranks):
    assert ranks(2).run(_refused) == [0, 0]

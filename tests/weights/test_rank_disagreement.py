"""Ranks that differ: named within seconds by the check (`debug=True`), never two weights of one size mixed in silence.

Also what ranks may differ in: their hash seeds, their memory, their data.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.collectives import collective_log, delayed_collectives
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide, inputs, linears, square

DEBUG = gtp.GTPConfig(debug=True, debug_timeout=30.0)  # a busy machine is no desync
ABSENT = gtp.GTPConfig(debug=True, debug_timeout=3.0)  # for a rank that never comes


class Senses(nn.Module):
    """Two candidate modules of one shape: on the wire, nothing but a name tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.vision, self.sound = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.use: tuple[str, ...] = ("vision",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        for name in self.use:
            x = x + getattr(self, name)(x)
        return self.head(x)


def _other_module(of_rank_1, config):
    model = Senses()
    gtp.shard_model(model, dist.group.WORLD, config=config)
    x = inputs(0, 3, 16)[rank()]
    model(x).sum().backward()
    if rank() == 1:
        model.use = of_rank_1
    began = time.monotonic()
    with pytest.raises(gtp.DesyncError) as caught:
        model(x).sum().backward()
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("of_rank_1", [(), ("sound",), ("vision", "sound")])
def test_a_rank_that_uses_other_modules_is_named_on_every_rank(ranks, of_rank_1):  # C39
    for message, seconds in ranks(2).run(_other_module, of_rank_1, DEBUG):
        assert seconds < 15
        assert "rank 0" in message
        assert "rank 1" in message
        assert "use vision.weight in forward" in message or "use sound.weight in forward" in message
        assert "must still run it" in message


def _runs_on_masked_input(config):
    """The documented remedy: a rank without work for a module runs it with no weight in the loss."""

    def loss(model, batch):
        x, works = batch
        x = model.trunk(x)
        seen = model.vision(x)
        return model.head(x + (seen if works else 0 * seen)).pow(2).mean()

    twins = SideBySide(Senses, config=config)
    for step in range(3):
        twins.step([(x, r != 1) for r, x in enumerate(inputs(step, 3, 16))], loss)


def test_running_a_module_on_masked_input_is_the_remedy(ranks):  # C39
    for config in (DEBUG, gtp.GTPConfig()):
        ranks(2).run(_runs_on_masked_input, config)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.a(x), self.b(x)


def _heads(remedy, config):
    def loss(model, batch):
        x, which = batch
        outputs = model(x)
        value = outputs[which].pow(2).mean()
        return value + 0 * outputs[1 - which].sum() if remedy else value

    every = [(x, r) for r, x in enumerate(inputs(0, 3, 16))]
    if remedy:
        SideBySide(TwoHeads, config=config).step(every, loss)
        return None
    model = TwoHeads()
    gtp.shard_model(model, dist.group.WORLD, config=config)
    with pytest.raises(gtp.DesyncError) as caught:
        loss(model, every[rank()]).backward()
    return str(caught.value)


def test_heads_that_only_one_rank_differentiates(ranks):  # C42
    for message in ranks(2).run(_heads, False, DEBUG):
        assert "gradient of a.weight" in message
        assert "gradient of b.weight" in message
    ranks(2).run(_heads, True, DEBUG)
    ranks(2).run(_heads, True, gtp.GTPConfig())


def _mixed(program):
    """No check is on, and no collective complains."""
    twins = SideBySide(Senses if program == "modules" else TwoHeads)
    model, runtime = twins.sharded, twins.runtime
    every = inputs(0, 3, 16)

    def loss(model, x):
        outputs = model(x)
        return (outputs if program == "modules" else outputs[0]).pow(2).mean()

    if program == "modules":
        model.use = (("vision", "sound")[rank()],)
        value = loss(model, every[rank()])
    else:
        value = model(every[rank()])[rank()].sum()
    with pytest.raises(gtp.DesyncError, match="reduced the gradients of different weights"):
        value.backward()
    assert all(p.grad is None for p in model.parameters())
    model.use = ("vision",)
    for _ in range(2):
        twins.step(every, loss)  # the model is as it was, and trains
    assert runtime.stats().unreduced_bytes == 0


@pytest.mark.parametrize("program", ["modules", "heads"])
def test_mixed_weights_are_found_out_at_the_end_of_backward_without_the_check(ranks, program):  # C39, C42
    """Before any gradient is delivered, where biases carry the question."""
    ranks(2).run(_mixed, program)


def _one_rank_fails():
    model = linears(3)
    gtp.shard_model(model, dist.group.WORLD, config=ABSENT)
    x = inputs(0, 3, 16)[rank()]
    model(x).sum().backward()
    if rank() == 1:
        return "a user's exception took this rank elsewhere"
    with pytest.raises(gtp.DesyncError) as caught:
        model(x).sum().backward()
    return str(caught.value)


def test_a_rank_that_left_is_named_after_the_timeout(ranks):
    assert "rank 1 did not come within 3 s" in ranks(2).run(_one_rank_fails)[0]


def _micro_batches():
    """One rank has run out of data: it begins its step's end while the other begins another forward."""
    model = linears(2)
    gtp.shard_model(model, dist.group.WORLD, config=ABSENT)
    for x in inputs(rank(), 3, 16)[: 2 - rank()]:
        if rank() == 1:
            model(x).sum().backward()
            return ""
        model(x).sum().backward()
        with pytest.raises(gtp.DesyncError) as caught:
            model(x).sum().backward()
        return str(caught.value)


def test_another_number_of_micro_batches_is_named(ranks):
    assert "rank 1 did not come" in ranks(2).run(_micro_batches)[0]


DIFFERENCES = {
    "shape": (lambda r: linears(2, 16 + 4 * r), {}, r"0.weight \(16, 16\) float32, sharded.*0.weight \(20, 20\)"),
    "count": (lambda r: linears(2 + r), {}, r"settings .*2.weight"),
    "dtype": (lambda r: linears(2).to([torch.float32, torch.bfloat16][r]), {}, "float32.*bfloat16"),
    "selection": (lambda r: linears(2), {"exclude": [None, "1.weight"]}, "1.weight.*sharded.*replicated"),
    "settings": (
        lambda r: linears(2),
        {"config": [gtp.GTPConfig(keep_bytes=8), gtp.GTPConfig(keep_bytes=9)]},
        "keep_bytes=8.*keep_bytes=9",
    ),
}


def _different_models(name):
    build, by_rank, message = DIFFERENCES[name]
    options = {key: values[rank()] for key, values in by_rank.items()}
    with pytest.raises(gtp.DesyncError, match="(?s)about to shard different models.*" + message):
        gtp.shard_model(build(rank()), dist.group.WORLD, **options)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_shard_different_models_are_told_at_once(ranks, name):
    ranks(2).run(_different_models, name)


def _checked_training():
    """The check itself: two models at a time, one after another in a process, and a rank that is late."""
    first, second = (SideBySide(lambda: linears(3, bias=True), config=DEBUG) for _ in range(2))
    with delayed_collectives(0.01, rank=1):
        for step in range(2):
            first.step(inputs(step, 3, 16))
            second.step(inputs(step, 3, 16))
    third = SideBySide(lambda: linears(2), config=DEBUG)
    third.step(inputs(0, 3, 16))
    assert torch.equal(third.sharded[0].weight.full_tensor(), third.plain[0].weight)
    return type(first.runtime.transport).__name__, type(SideBySide(lambda: linears(1)).runtime.transport).__name__


def test_the_check_lets_right_programs_pass_and_is_absent_when_off(ranks):
    names = ("CheckedTransport", "ProcessGroupTransport")
    assert ranks(2).run(_checked_training) == [names, names]


def _collectives_and_a_hash():
    """Every collective of three steps and what comes around them; what a string hashes to in this process."""
    junk = [object() for _ in range(1000 * rank())]
    model = linears(20, width=8, bias=True)
    with collective_log() as log:
        gtp.shard_model(model, dist.group.WORLD)
        optimizer = torch.optim.AdamW(model.parameters())
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(lambda p: None)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            gtp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for value in model.state_dict().values():
            value.full_tensor() if hasattr(value, "full_tensor") else None
    del junk
    return log.lines(), hash("seed")


def test_collectives_do_not_depend_on_hash_seeds(ranks):  # C41
    (first, one), (second, other) = ranks(2).run(_collectives_and_a_hash)
    assert one != other, "the seeds did not differ"
    assert first == second
    assert len(first) > 20 * 3 * 3


def _memory_differs():
    """Ranks that garbage-collect, hold tensors and look at weights as they please issue the same collectives."""
    held = []

    def loss(model, x):
        if rank() == 0:
            held.extend(p.detach() for p in model.parameters())
            for parameter in model.parameters():
                repr(parameter), parameter.grad, parameter.data
        return square(model, x)

    twins = SideBySide(lambda: linears(4, bias=True))
    with collective_log() as log:
        for step in range(4):
            twins.step(inputs(step, 3, 16), loss)
            if rank() == 1:
                held.append(torch.empty(1000))
    return log.lines()


def test_looking_at_weights_on_one_rank_changes_no_collective(ranks):  # C41
    first, second = ranks(2).run(_memory_differs)
    assert first == second

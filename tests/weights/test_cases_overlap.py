"""Gathers start before they are needed and reductions end after the next layer has begun: overlap, as users see it."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.collectives import collective_log
from gtp.testing.ranks import rank
from tests.weights.side_by_side import inputs, sgd, square

LAYERS = 6
ROWS = [32 + 4 * index for index in range(LAYERS)]  # layers are told apart by the rows of their weight


class Hooked(nn.Sequential):
    """A user's model with a pre-hook of its own, which scales the input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _layers():
    return [nn.Linear(24 if index == 0 else ROWS[index - 1], rows, bias=False) for index, rows in enumerate(ROWS)]


def _marked(log, model):
    """Marks the begin and the end of each layer's forward and backward."""
    handles = []
    for index, layer in enumerate(model):

        def before(module, args, index=index):
            log.mark(f"forward {index} begins")

        def after(module, args, output, index=index):
            log.mark(f"forward {index} ends")
            output.register_hook(functools.partial(_mark, log, f"backward {index} begins"))
            args[0].register_hook(functools.partial(_mark, log, f"backward {index} ends"))

        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    return handles


def _mark(log, text, grad):
    log.mark(text)


def _steps(hooked, config, count=4):
    """Lines of the log of each step, gathers and reductions named by their layer."""
    model = (Hooked if hooked else nn.Sequential)(*_layers())
    gtp.shard_model(model, dist.group.WORLD, config=config)
    optimizer = sgd(model.parameters())
    steps = []
    for step in range(count):
        with collective_log() as log:
            handles = _marked(log, model)
            square(model, inputs(step, 2, 24)[rank()].requires_grad_()).backward()
            for handle in handles:
                handle.remove()
            optimizer.step()
            optimizer.zero_grad()
        lines = []
        for record in log.records:
            if record.event == "mark":
                lines.append(record.kind)
            else:
                what = {"all_gather_into_tensor": "gather", "all_to_all_single": "reduce"}[record.kind]
                lines.append(f"{what} {ROWS.index(record.shape[0])} {record.event}")
        steps.append(lines)
    return steps


@pytest.mark.parametrize("hooked", [False, True])
def test_each_gather_starts_before_the_layer_in_front_of_it_is_done(ranks, hooked):
    """C98."""
    for steps in ranks(2).run(_steps, hooked, gtp.GTPConfig()):
        for lines in steps[1:]:  # the first step learns the order
            at = {line: lines.index(line) for line in lines}
            last = {line: len(lines) - 1 - lines[::-1].index(line) for line in lines}
            for index in range(LAYERS - 1):
                assert at[f"gather {index + 1} start"] < at[f"forward {index} ends"]
                assert last[f"gather {index} start"] < last[f"backward {index + 1} ends"]
                assert at[f"reduce {index} start"] < at[f"backward {index} ends"]
            # at most one gather a weight and direction; those at the turn need none in backward
            counts = [lines.count(f"gather {index} start") for index in range(LAYERS)]
            assert set(counts) <= {1, 2}
            assert counts[0] == 2
            assert [lines.count(f"reduce {index} start") for index in range(LAYERS)] == [1] * LAYERS


def test_reductions_are_waited_for_after_the_next_layer_has_begun(ranks):
    """C98."""
    for steps in ranks(2).run(_steps, False, gtp.GTPConfig()):
        for lines in steps:
            at = {line: lines.index(line) for line in lines}
            for index in range(1, LAYERS):
                assert at[f"backward {index - 1} begins"] < at[f"reduce {index} wait"]
            # while a reduction is on its way the dgrad of its own layer is computed
            for index in range(LAYERS):
                assert at[f"reduce {index} start"] < at[f"backward {index} ends"] < at[f"reduce {index} wait"]


def test_without_prefetching_each_gather_is_at_the_moment_of_use(ranks):
    """C98: that the assertions above would see it."""
    for steps in ranks(2).run(_steps, False, gtp.GTPConfig(prefetch_bytes=0)):
        for lines in steps:
            at = {line: lines.index(line) for line in lines}
            for index in range(LAYERS - 1):
                assert at[f"gather {index + 1} start"] > at[f"forward {index} ends"]
            assert [lines.count(f"gather {index} start") for index in range(LAYERS)] == [2] * LAYERS


def _same_order_everywhere():
    return _steps(True, gtp.GTPConfig(keep_bytes=20_000))


def test_every_rank_starts_the_same_collectives_in_the_same_order(ranks):
    """C98, C41."""
    first, *others = ranks(4).run(_same_order_everywhere)
    starts = [[line for line in step if line.endswith("start")] for step in first]
    for other in others:
        assert [[line for line in step if line.endswith("start")] for step in other] == starts
    assert starts[2] == starts[3]
    # what is kept from forward is not gathered again
    assert sum("gather" in line for line in starts[3]) < 2 * LAYERS

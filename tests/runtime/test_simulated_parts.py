"""Parts of a model that are captured by themselves, forward and backward each, on simulated streams in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp.config import GTPConfig
from gtp.runtime.parts import Part
from gtp.runtime.schedule import Phase, Schedule
from tests.runtime.simulated_streams import Graph, Machine
from tests.runtime.simulated_training import Trainer
from tests.runtime.test_copy_engine_protocol import expected_sum
from tests.runtime.test_simulated_training import _PAGES, _SHAPES, _check, _trainers


@dataclasses.dataclass
class Layer:
    """Some groups of a rank's model, used in their order."""

    trainer: Trainer
    order: Sequence[int]
    window: int

    def __post_init__(self) -> None:
        groups = self.trainer.me.groups
        sizes = [group.gathered_nbytes for group in groups]
        self.part = Part(lambda: Schedule(sizes, prefetch_bytes=self.window, keep_bytes=0), groups)

    def forward(self, time: int) -> None:
        self.trainer.gatherer.open_part(self.part.forward)
        for index in self.order:
            self.trainer.use(index, Phase.FORWARD, time)
        self.trainer.gatherer.close_line()

    def backward(self, time: int) -> None:
        """Gradients are returned, as `torch.autograd.grad` has it, and read when backward has ended."""
        trainer = self.trainer
        returned: dict[int, list[torch.Tensor]] = {}
        trainer.gatherer.open_part(self.part.backward)
        for index in reversed(self.order):
            group = trainer.me.groups[index]
            buffers = [trainer.reducer.grad_buffer(group, position) for position in range(len(group.members))]
            for buffer, wgrad in zip(buffers, trainer.me.wgrads(group, time), strict=True):
                trainer.copy(buffer, wgrad)
            gradients = trainer.reducer.reduce_returned(group, buffers, at_once=False)
            again = index in returned
            returned.setdefault(index, gradients)
            if again:  # autograd adds them up as they come
                for each in (*returned[index], *gradients):
                    self.look(index, each, returned[index] + gradients, time)
            trainer.use(index, Phase.BACKWARD, time)
        trainer.reducer.end_backward()
        for index, gradients in returned.items():
            for each in gradients:
                self.look(index, each, gradients, time)
        trainer.gatherer.close_line()

    def look(self, index: int, gradient: torch.Tensor, among: Sequence[torch.Tensor], time: int) -> None:
        trainer = self.trainer
        group = trainer.me.groups[index]
        member = next(i for i, each in enumerate(among) if each is gradient) % len(group.members)
        trainer.look(gradient, expected_sum(group, member, trainer.over[index], time, trainer.me.rank))


def train(trainer: Trainer, layers: Sequence[Layer], replays: int, eager: bool, seed: int) -> None:
    """A warm-up of each layer, the captures, and steps that replay them all."""
    for layer in layers:
        for _ in range(2):
            layer.forward(0)
            layer.backward(0)
    last = replays - 1
    graphs: list[Graph] = [trainer.capture(lambda: layer.forward(last)) for layer in layers]  # noqa: B023
    graphs += [trainer.capture(lambda: layer.backward(last)) for layer in reversed(layers)]  # noqa: B023
    for time in range(replays):
        if eager:  # the rest of the model, whose line is open meanwhile
            trainer.gatherer.open_line()
            trainer.use(0, Phase.FORWARD, time)
        for number, graph in enumerate(graphs):
            trainer.driver.replay(graph, seed + number)
            if eager and number == len(layers) - 1:
                trainer.use(3, Phase.FORWARD, time)
        if eager:
            trainer.gatherer.close_line()
        trainer.me.write_shards(1.0)


@pytest.mark.parametrize("ranks, serial", [(2, False), (2, True), (4, False)])
@given(
    seed=st.integers(0, 2**31),
    orders=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=3),
    window=st.sampled_from([0, 512, 8192, 32768]),
    limit=st.sampled_from([0, 1 << 30]),
    pages=st.booleans(),
    replays=st.integers(1, 2),
    eager=st.booleans(),
)
@settings(max_examples=10)
def test_graphs_of_layers_read_weights_as_they_are(
    ranks: int,
    serial: bool,
    seed: int,
    orders: list[list[int]],
    window: int,
    limit: int,
    pages: bool,
    replays: int,
    eager: bool,
) -> None:
    """Also when an optimizer writes right after the last replay, and where an eager line is open around them."""
    machine = Machine(ranks, serial=serial)
    config = GTPConfig(prefetch_bytes=window, grad_reduce="sum")
    trainers = _trainers(machine, config, limit, [], _PAGES if pages else _SHAPES)
    for trainer in trainers:
        train(trainer, [Layer(trainer, order, window) for order in orders], replays, eager, seed)
    machine.run(seed)
    _check(trainers)


def test_a_layer_gathers_ahead_and_reduces_beside_its_backward() -> None:
    machine = Machine(2)
    (trainer, _) = _trainers(machine, GTPConfig(prefetch_bytes=32768, grad_reduce="sum"), 1 << 30, [])
    layer = Layer(trainer, [0, 1, 2], 32768)
    transport, calls = trainer.me.transport, []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "close", "start_gather", "finish_gather", "start_reduce", "finish_reduce"):
            call = getattr(transport, name)
            patch.setattr(transport, name, lambda *a, name=name, call=call, **k: calls.append(name) or call(*a, **k))
        for _ in range(2):
            layer.forward(0)
            layer.backward(0)
        trainer.reducer._window_bytes = 1 << 30
        for captured in (layer.forward, layer.backward):
            calls.clear()
            trainer.capture(lambda: captured(0))  # noqa: B023
            assert calls.count("open") == calls.count("close") == 1
            # all three are under way before the first is used
            assert calls[1:4] == ["start_gather"] * 3
            assert calls.count("start_gather") == 3
    reductions = [call for call in calls if call.endswith("reduce")]
    assert reductions == ["start_reduce"] * 3 + ["finish_reduce"] * 3


@pytest.mark.parametrize("seed", range(4))
def test_a_weight_that_the_warm_up_did_not_use_is_published_in_the_graph(seed: int) -> None:
    """Its storage was re-pointed: peers would read what was there before."""
    machine = Machine(2)
    trainers = _trainers(machine, GTPConfig(prefetch_bytes=512, grad_reduce="sum"), 1 << 30, [])
    for trainer in trainers:
        layer = Layer(trainer, [0, 1], 512)
        for _ in range(2):
            layer.forward(0)
        for member in trainer.me.groups[2].members:
            before, member.shard = member.shard, member.shard.clone()
            member.send = member.shard
            before.fill_(-1.0)  # which is what peers read
        layer.order = [0, 2, 1, 2]
        trainer.driver.replay(trainer.capture(lambda: layer.forward(0)), seed)  # noqa: B023
    machine.run(seed)
    _check(trainers)


def test_what_is_left_of_a_part_that_failed_is_no_part() -> None:
    machine = Machine(2)
    trainers = _trainers(machine, GTPConfig(prefetch_bytes=512, grad_reduce="sum"), 1 << 30, [])
    for trainer in trainers:
        layer = Layer(trainer, [0, 1], 512)
        layer.forward(0)
        trainer.gatherer.open_part(layer.part.forward)
        trainer.use(0, Phase.FORWARD, 0)
        trainer.gatherer.drop_all()
        assert not trainer.gatherer.in_part
        trainer.step([0, 1, 2, 3], [], 0, lambda: None)
    machine.run(0)
    _check(trainers)

"""`unshard=`: what is left whole, what is refused, and what a wrong use is told."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import gtp
from gtp.modules import GroupedLinear
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide, inputs
from tests.weights.unshard_kinds import Conv1D, Experts


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "raise":
            raise RuntimeError("deliberate")
        if self.how == "write":
            with torch.no_grad():
                self.weight.mul_(2)
        saved = (x @ self.weight).exp()
        y = saved * 1.0
        if self.how == "change":
            with torch.no_grad():
                saved.zero_()
        return y


def _misuse():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Fails()), unshard="*", optimizer=None)
    model, x = twins.sharded, inputs(0, 10, 8)[rank()]
    for how, error, text in (
        ("raise", RuntimeError, "deliberate"),
        ("write", gtp.errors.GTPStateError, r"1\.weight.*wrote into a weight.*would be lost"),
    ):
        model[1].how = how
        with pytest.raises(error, match=text):
            model(x)
        assert isinstance(model[1].weight, gtp.GTPWeight)
    model[1].how = "change"
    y = model(x)
    with pytest.raises(gtp.errors.GTPStateError, match=r"1\.weight.*changed in place"):
        y.sum().backward()
    model[1].how = ""
    y = model(x)
    with torch.no_grad():
        model[1].weight.mul_(1.0)
    with pytest.raises(gtp.errors.GTPStateError, match=r"1\.weight.*changed in place"):
        y.sum().backward()
    with pytest.raises(gtp.errors.UnsupportedError, match=r"double backward"):
        torch.autograd.grad(model(x).sum(), [model[1].weight], create_graph=True)
    twins.plain[1].how = ""
    twins.step(inputs(1, 10, 8))


def test_what_goes_wrong_is_said_and_the_next_step_is_right(ranks):
    ranks(2).run(_misuse)


def _selected(model, **options):
    model = copy.deepcopy(model)
    runtime = gtp.shard_model(model, dist.group.WORLD, **options)
    return {line.name: (line.sharded, line.reason) for line in runtime.report.lines}


def _selection():
    model = nn.Sequential(nn.Linear(8, 8), Experts(), Conv1D(), nn.LSTM(8, 8), nn.Embedding(4, 8, max_norm=1.0))
    lines = _selected(model, unshard=["1.*", "2.weight"])
    assert lines["0.weight"] == (True, "weight of Linear")
    assert lines["1.up"] == (True, "named by unshard")
    assert lines["2.bias"][0] is False
    lines = _selected(model, unshard="*", exclude="2.*")
    assert lines["2.weight"] == (False, "excluded by name")
    assert lines["3.weight_hh_l0"] == (False, "LSTM keeps a list of its own of its parameters")
    assert lines["4.weight"][1].startswith("nn.Embedding with max_norm")
    lines = _selected(model, include="0.weight", unshard="1.up")
    assert [name for name, (sharded, _) in lines.items() if sharded] == ["0.weight", "1.up"]
    for options, text in (
        ({"unshard": "1.upp"}, r"unshard pattern '1.upp' matches no parameter"),
        ({"unshard": "3.weight_hh_l0"}, r"3\.weight_hh_l0 cannot be sharded: LSTM keeps.*out of unshard"),
    ):
        with pytest.raises(gtp.errors.GTPValueError, match=text):
            _selected(model, **options)
    held = nn.ParameterList([torch.randn(4, 4)])
    with pytest.raises(gtp.errors.GTPValueError, match=r"held by a ParameterList, which has none"):
        gtp.shard_model(held, dist.group.WORLD, unshard="*")
    assert type(held[0]) is nn.Parameter
    # without unshard, the error of such a use names it
    gtp.shard_model(model, dist.group.WORLD, include=["0.weight", "2.weight"])
    with pytest.raises(gtp.errors.UnsupportedError, match=r"2\.weight.*addmm.*unshard="):
        model[2](torch.randn(4, 8))


def test_what_is_unsharded_and_what_is_refused(ranks):
    ranks(2).run(_selection)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _warned(unshard):
    handler = _Lines()
    logging.getLogger("gtp").addHandler(handler)
    try:
        model = nn.Sequential(nn.Linear(8, 8), Experts(), Conv1D(), nn.LayerNorm(8))
        gtp.shard_model(model, dist.group.WORLD, unshard=unshard)
    finally:
        logging.getLogger("gtp").removeHandler(handler)
    return handler.lines


def test_a_model_that_stays_mostly_whole_is_said_with_the_remedy(ranks):
    (line,) = ranks(2).run(_warned, None)[0]
    whole, every = 2 * 240 + 64 + 3 * 8, 2 * 240 + 64 + 3 * 8 + 64 + 8
    assert f"{round(100 * (whole + 8) / every)}% of the model's elements stay whole" in line
    assert "1.up, 1.down, 2.weight, ..." in line
    assert "unshard=" in line
    assert ranks(2).run(_warned, "*")[0] == []


def _rank_disagrees():
    options = {} if rank() else {"unshard": "1.*"}
    include = ["0.weight", "1.up", "1.down"]
    with pytest.raises(gtp.errors.DesyncError, match=r"1\.up .*unsharded in forward"):
        gtp.shard_model(nn.Sequential(nn.Linear(8, 8), Experts()), dist.group.WORLD, include=include, **options)


def test_ranks_that_unshard_different_weights_are_told(ranks):
    ranks(2).run(_rank_disagrees)


class Raises(torch.autograd.Function):
    """In backward, if it is told to."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.told = told
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.told:
            raise RuntimeError("deliberate")
        return grad, None


class FailsInBackward(nn.Module):
    """After its weight was read, before its gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.told = nn.Parameter(torch.randn(8, 8)), [True]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Raises.apply(x, self.told) @ self.weight


def _backward_again():
    model = nn.Sequential(nn.Linear(8, 8), FailsInBackward())
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    loss = model(torch.randn(4, 8)).sum()
    with pytest.raises(RuntimeError, match="deliberate"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    model[1].told.clear()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(gtp.errors.GTPStateError, match=r"1\.weight.*changed in place"):
        loss.backward()


def test_weights_that_changed_after_a_backward_that_raised_are_not_taken_for_those_of_forward(ranks):
    ranks(2).run(_backward_again)


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), -1.0))
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "write":
            self.weight.data.clamp_(min=0.0)
        if self.how == "replace":
            self.weight.data = self.weight.detach().clone()
        return x @ self.weight


def _written_past_autograd():
    for how, debug in (("replace", False), ("replace", True), ("write", True)):
        model = nn.Sequential(nn.Linear(8, 8), Clamps())
        gtp.shard_model(model, dist.group.WORLD, unshard="*", config=gtp.GTPConfig(debug=debug))
        model[1].weight.data.fill_(float("nan"))  # is itself
        model(torch.randn(4, 8))
        model[1].weight.data.fill_(-1.0)
        model[1].how = how
        with pytest.raises(gtp.errors.GTPStateError, match=r"1\.weight.*wrote into a weight"):
            model(torch.randn(4, 8))


def test_writes_through_data_are_noticed_in_debug_mode(ranks):
    ranks(2).run(_written_past_autograd)


def _left_whole():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normed = nn.utils.weight_norm(nn.Linear(8, 8))
        pruned = prune.l1_unstructured(nn.Conv1d(8, 8, 3), "weight", amount=2)
        scripted = torch.jit.script(nn.Linear(8, 8))
    bag = nn.EmbeddingBag(4, 8, max_norm=1.0)
    model = nn.ModuleList([nn.Linear(8, 8), normed, pruned, scripted, bag])
    runtime = gtp.shard_model(model, dist.group.WORLD, unshard="*", include="*")
    lines = {line.name: line for line in runtime.report.lines}
    assert [name for name, line in lines.items() if line.sharded] == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert lines["4.weight"].reason == "nn.EmbeddingBag with max_norm rescales rows of it in forward"
    assert lines["3.weight"].reason.startswith("torch.jit.script compiled its module")
    for name in ("1.weight_g", "1.weight_v", "2.weight_orig"):
        assert "in a hook, before the forward; use torch.nn.utils.parametrizations" in lines[name].reason
    x = torch.randn(4, 8)
    assert torch.equal(model[3](x), x @ model[3].weight.T + model[3].bias)
    assert model[1](x).shape == model[2](x[..., None].expand(4, 8, 8)).shape[:2]


def test_parameters_that_no_forward_reads_from_its_module_stay_whole(ranks):
    ranks(2).run(_left_whole)


def _tied_to_a_group():
    grouped, tied = GroupedLinear(2, 8, 8, bias=False), Conv1D()
    tied.weight = grouped.weight0
    with pytest.raises(gtp.errors.GTPValueError, match=r"0\.weight0 = 1\.weight: .*together with 0\.weight1.*Conv1D"):
        gtp.shard_model(nn.Sequential(grouped, tied), dist.group.WORLD, unshard="1.*")
    assert type(tied.weight) is nn.Parameter


def test_a_weight_of_a_group_that_another_forward_reads_is_refused(ranks):
    ranks(2).run(_tied_to_a_group)

"""Models as torch ships them, moved and cast as users do, and what `shard_model` reports of each parameter."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.testing.ranks import rank
from tests.reference import full
from tests.weights.side_by_side import ROUNDED, SideBySide, adamw, inputs

# --- torch's own models


class Decoder(nn.TransformerDecoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x.flip(1))


class Classifier(nn.Sequential):
    """Layers with weights that gtp does not serve around those that it does."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, track_running_stats=False), nn.GRU(8, 8, batch_first=True)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self[2](self[1](self[0](x)))[0])


MODELS = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2),
    "decoder": lambda: Decoder(8, 2, 12, dropout=0.0, batch_first=True),
    "classifier": Classifier,
}


def _as_torch_ships_it(name):
    twins = SideBySide(MODELS[name], optimizer=adamw)
    for step in range(3):
        twins.step(inputs(step, 2, 3, 8))
        x = inputs(step, 2, 3, 8)[rank()]
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            for model in (twins.plain, twins.sharded):
                model.eval()  # torch takes its fused path here for plain weights, which rounds in its own way
            with mode():
                torch.testing.assert_close(twins.sharded(x), twins.plain(x), **ROUNDED)
        for model in (twins.plain, twins.sharded):
            model.train()
    return sorted(line.name for line in twins.runtime.report.lines if line.sharded)


SHARDED = {
    "encoder": [f"layers.{i}.linear{j}.weight" for i in (0, 1) for j in (1, 2)],
    "decoder": ["linear1.weight", "linear2.weight"],
    "classifier": ["head.weight"],
}


@pytest.mark.parametrize("name", MODELS)
def test_torchs_own_models_train_bit_for_bit(ranks, name):
    assert ranks(2).run(_as_torch_ships_it, name) == [SHARDED[name]] * 2


class Own(nn.Module):
    """A user's module that gives its weight to some function."""

    def __init__(self, shape, function) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def _weights_that_gtp_does_not_serve():
    """Of torch's modules they are refused when asked for by name; of a user's when the function is called."""
    x = inputs(0, 2, 3, 8)[rank()]
    attention, conv = nn.MultiheadAttention(8, 2), nn.Conv1d(3, 4, 1)
    for model, name in [(attention, "in_proj_weight"), (attention, "out_proj.weight"), (conv, "weight")]:
        with pytest.raises(gtp.GTPValueError, match=rf"{name} cannot be sharded: .*leave it out of include"):
            gtp.shard_model(model, dist.group.WORLD, include=name)
    cases = [
        ("conv1d", (4, 3, 1), F.conv1d),
        ("bilinear", (4, 8, 8), lambda x, w: F.bilinear(x, x, w)),
        ("embedding_bag", (10, 8), lambda x, w: F.embedding_bag(torch.zeros(2, 3, dtype=torch.long), w)),
        ("layer_norm", (8,), lambda x, w: F.layer_norm(x, (8,), w)),
        ("scaled_dot_product_attention", (3, 8), lambda x, w: F.scaled_dot_product_attention(x, x, w)),
    ]
    for function, shape, call in cases:
        model = Own(shape, call)
        gtp.shard_model(model, dist.group.WORLD, include="weight")
        with pytest.raises(gtp.UnsupportedError, match=rf"sharded weight 'weight': {function} needs the full weight"):
            model(x)


def test_a_weight_that_gtp_does_not_serve_is_refused_by_name(ranks):
    """C65."""
    ranks(2).run(_weights_that_gtp_does_not_serve)


def _nothing_to_shard(build):
    with pytest.raises(gtp.GTPValueError, match=r"found nothing to shard.*name others with include=") as caught:
        gtp.shard_model(build(), dist.group.WORLD)
    return str(caught.value)


def test_a_model_without_a_linear_is_refused_with_a_reason_for_each_parameter(ranks):
    """C90."""
    (text, _) = ranks(2).run(_nothing_to_shard, _attention)
    assert "in_proj_weight: in_proj_weight of MultiheadAttention is not the weight of a Linear or Embedding" in text
    assert "out_proj.weight: nn.MultiheadAttention passes it to a fused function that gtp does not serve" in text
    (text, _) = ranks(2).run(_nothing_to_shard, nn.ReLU)
    assert "(the model has no parameters)" in text


def _attention():
    return nn.MultiheadAttention(8, 2)


# --- moved and cast

SAME = {
    "cpu": lambda m: m.cpu(),
    "to_cpu": lambda m: m.to("cpu"),
    "to_float32": lambda m: m.to(torch.float32),
    "float": lambda m: m.float(),
    "to_like": lambda m: m.to(torch.zeros(1)),
    "train_and_eval": lambda m: m.eval().train(),
    "requires_grad": lambda m: m.requires_grad_(False).requires_grad_(True),
    "apply": lambda m: m.apply(lambda module: None),
}
REFUSED = {
    "to_bfloat16": (lambda m: m.to(torch.bfloat16), r"must keep shape, dtype and device type.*param_dtype"),
    "bfloat16": (lambda m: m.bfloat16(), r"got \(\(4, 8\), torch\.bfloat16, 'cpu'\).*Convert or move the model before"),
    "half": (lambda m: m.half(), r"got \(\(4, 8\), torch\.float16, 'cpu'\)"),
    "double": (lambda m: m.double(), r"got \(\(4, 8\), torch\.float64, 'cpu'\)"),
    "type": (lambda m: m.type(torch.float64), "must keep shape, dtype and device type"),
    "to_meta": (lambda m: m.to("meta"), "moving a sharded weight from cpu to meta.*Move the model before"),
    "share_memory": (lambda m: m.share_memory(), "share_memory_ needs the full weight"),
    "init": (lambda m: nn.init.normal_(m[0].weight), "a seed of its own.*Initialize the model before"),
    "reset_parameters": (lambda m: m[0].reset_parameters(), "a seed of its own"),
    "deepcopy": (lambda m: copy.deepcopy(m[0].weight), "cannot be copied. Copy the plain model before"),
}


def _moved():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 6)))
    for step, move in enumerate(SAME.values()):
        before = list(twins.sharded.parameters())
        move(twins.sharded)
        assert all(a is b for a, b in zip(before, twins.sharded.parameters(), strict=True))
        twins.step(inputs(step, 3, 8))
    for move, message in REFUSED.values():
        with pytest.raises(gtp.GTPError, match=message) as caught:
            move(twins.sharded)
        assert "0.weight" in str(caught.value)
        twins.step(inputs(99, 3, 8))


def test_a_sharded_model_is_moved_and_cast_rightly_or_refused_by_name(ranks):
    ranks(2).run(_moved)


def _copied():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)))
    for way in (copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(gtp.UnsupportedError, match="cannot be copied or pickled: save state dicts"):
            way(twins.sharded)
        twins.step(inputs(0, 3, 8))


def test_a_sharded_model_is_not_copied_or_pickled_whole(ranks):
    ranks(2).run(_copied)


def _cast_before():
    """What the refusals advise. In bf16 torch's SGD rounds the odd end of a tensor in its own way: no odd ends here."""
    cast = SideBySide(lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).bfloat16())
    for step in range(3):
        cast.step([x.bfloat16() for x in inputs(step, 3, 16)])
    assert {p.dtype for p in cast.sharded.parameters()} == {torch.bfloat16}


def test_a_model_cast_before_sharding_trains_bit_for_bit(ranks):
    ranks(2).run(_cast_before)


# --- the report


class OwnLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(2)])
        self.own = OwnLinear(8, 8)
        self.by_name = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8, bias=False))})
        self.scale = nn.Parameter(torch.ones(8))
        self.bare = nn.Parameter(torch.randn(8, 8))
        self.listed = nn.ParameterList([torch.randn(8, 8)])
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.table.weight
        self.hidden = [nn.Linear(8, 8)]
        self.settings = {"gate": nn.Parameter(torch.ones(8))}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block["up"](block["norm"](x))
        x = self.frozen(self.by_name["a"](self.own(x))) * self.scale
        return self.head(x @ self.bare @ self.listed[0])


def _reported(include):
    def build():
        model = Scattered()
        if include:
            model.bare.requires_grad_(False)
        return model

    twins = SideBySide(build, optimizer=None, include=include, **ROUNDED)
    report = twins.runtime.report
    if not include:
        generator = torch.Generator().manual_seed(1)
        twins.backward([torch.randint(30, (2, 3), generator=generator) for _ in range(2)])
    assert [n for n, _ in twins.sharded.named_parameters()] == [line.name for line in report.lines]
    assert report.num_parameters == sum(p.numel() for p in twins.plain.parameters())
    assert report.local_bytes == sum(p.untyped_storage().nbytes() for p in twins.sharded.parameters())
    for line in report.lines:
        parameter = twins.sharded.get_parameter(line.name)
        assert line.sharded == isinstance(parameter, gtp.GTPWeight), line
        assert line.shape == tuple(full(parameter).shape)
        assert line.trained == parameter.requires_grad
        assert (line.ranks == 2) == line.sharded
    return report


REASONS = {
    "table.weight": "weight of Embedding",
    "blocks.0.up.weight": "weight of Linear",
    "blocks.0.up.bias": "bias of Linear is not the weight of a Linear or Embedding",
    "blocks.1.norm.weight": "weight of LayerNorm is not the weight of a Linear or Embedding",
    "own.weight": "weight of OwnLinear",
    "by_name.a.0.weight": "weight of Linear",
    "scale": "scale of Scattered is not the weight of a Linear or Embedding",
    "bare": "bare of Scattered is not the weight of a Linear or Embedding",
    "listed.0": "0 of ParameterList is not the weight of a Linear or Embedding",
    "frozen.weight": "weight of Linear",
    "counts": "counts of Scattered is not the weight of a Linear or Embedding",
}


def test_every_parameter_is_reported_with_what_became_of_it_and_why(ranks):
    """C92."""
    for report in ranks(2).run(_reported, None):
        lines = {line.name: line for line in report.lines}
        assert {name: lines[name].reason for name in REASONS} == REASONS
        sharded = {"table.weight", "blocks.0.up.weight", "blocks.1.up.weight", "own.weight", "by_name.a.0.weight"}
        assert {n for n, line in lines.items() if line.sharded} == sharded | {"frozen.weight"}
        assert lines["table.weight"].tied == ("head.weight",)
        unseen = {line.name: line for line in report.unregistered}
        assert set(unseen) == {"hidden[0].weight", "hidden[0].bias", "settings['gate']"}
        for line in unseen.values():
            assert not line.sharded
            assert "where torch does not see it: use nn.ModuleList, ModuleDict or ParameterList" in line.reason
        printed = str(report)
        assert re.search(r"^table\.weight +1/2 +\(30, 8\)  weight of Embedding$", printed, re.MULTILINE)
        assert printed.splitlines()[-1].startswith("6 of 17 parameters sharded, 755 elements in all, ")


def test_include_exclude_and_size_are_reasons_too(ranks):
    """C92."""
    for report in ranks(2).run(_reported, ["*.up.weight", "bare"]):
        lines = {line.name: line for line in report.lines}
        assert {n for n, line in lines.items() if line.sharded} == {"blocks.0.up.weight", "blocks.1.up.weight", "bare"}
        assert lines["bare"].reason == "named by include"
        assert lines["table.weight"].reason == "not named by include"
    (reasons, _) = ranks(2).run(_other_reasons)
    assert reasons == {
        "0.weight": "excluded by name",
        "1.weight": "64 elements, below min_numel=100",
        "2.weight": "weight of Linear",
    }


def _other_reasons():
    model = nn.Sequential(nn.Linear(8, 30, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False))
    config = gtp.GTPConfig(min_numel=100)
    runtime = gtp.shard_model(model, dist.group.WORLD, exclude="0.*", config=config)
    return {line.name: line.reason for line in runtime.report.lines}

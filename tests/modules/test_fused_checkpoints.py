"""State dicts of modules that fuse parameters: those of the unfused modules, whole or in part, and the fused layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)

import gtp
from gtp.errors import GTPValueError
from gtp.modules import FeedForward, FusedQKVLinear, FusedSwiGLU


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want)


def blocks(*, tp: bool) -> tuple[FeedForward, FusedSwiGLU]:
    group = dist.group.WORLD if tp else None
    torch.manual_seed(7)
    return FeedForward(8, 12, tp_group=group), FusedSwiGLU(8, 12, tp_group=group)


def swap_checkpoints() -> None:
    """Either block loads the other's checkpoint, and the fused layout."""
    plain, fused = blocks(tp=True)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1.0)
    fused.load_state_dict(plain.state_dict())
    same(fused.w13[:, 0], plain.w1.weight)
    same(fused.w13[:, 1], plain.w3.weight)
    same(fused.w2.weight, plain.w2.weight)
    with torch.no_grad():
        fused.w13.mul_(2.0)
    plain.load_state_dict(fused.state_dict())
    same(plain.w3.weight, fused.w13[:, 1])
    _, again = blocks(tp=True)
    again.load_state_dict({"w13": fused.w13.detach(), "w2.weight": fused.w2.weight.detach()})
    same(again.w13, fused.w13)
    # what a checkpoint library writes into the state dict in place reaches the parameter
    again.state_dict()["w3.weight"].zero_()
    same(again.w13[:, 1], torch.zeros(6, 8))
    same(again.w13[:, 0], fused.w13[:, 0])


def test_checkpoints_of_both_layouts_load(ranks):
    ranks(2).run(swap_checkpoints)


@pytest.mark.parametrize("state, message", [
    (lambda m: {**m.state_dict(), "w13": m.w13}, "has both w13 and w1.weight"),
    (lambda m: {"w1.weight": torch.ones(6, 8), **{k: v for k, v in m.state_dict().items() if k != "w1.weight"}},
     r"w1.weight must be \(12, 8\), got \(6, 8\)"),
])  # fmt: skip
def test_state_dicts_that_do_not_fit(state, message):
    block = FusedSwiGLU(8, 12)
    with pytest.raises(GTPValueError, match=message):
        block.load_state_dict(state(block))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "swiglu": lambda: FusedSwiGLU(8, 12),
    "qkv": lambda: FusedQKVLinear(8, 4, 2, bias=True),
}
PARTS = {
    "swiglu": ["w1.weight", "w3.weight", "w2.weight"],
    "qkv": ["wq.weight", "wq.bias", "wk.weight", "wk.bias", "wv.weight", "wv.bias"],
}


@pytest.mark.parametrize("kind, missing", [("swiglu", "w3.weight"), ("qkv", "wk.weight"), ("qkv", "wq.bias")])
def test_a_missing_part_is_reported_by_its_name(kind, missing):
    block = MODULES[kind]()
    state = {k: v for k, v in block.state_dict().items() if k != missing}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{missing}"'):
        block.load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_c34_a_part_loads_alone(kind, assign):
    """C34. With strict=False exactly that part changes, as it would in the unfused module."""
    for name in PARTS[kind]:
        block = nn.ModuleDict({"block": MODULES[kind]()})
        before = {k: v.clone() for k, v in block.state_dict().items()}
        wanted = dict(before) | {f"block.{name}": torch.full_like(before[f"block.{name}"], 3.0)}
        answer = block.load_state_dict({f"block.{name}": wanted[f"block.{name}"]}, strict=False, assign=assign)
        after = block.state_dict()
        assert list(after) == [f"block.{n}" for n in PARTS[kind]]
        assert all(torch.equal(after[k], wanted[k]) for k in wanted)
        assert answer.unexpected_keys == []
        assert f"block.{name}" not in answer.missing_keys
        if name != "w2.weight":  # a parameter of its own
            siblings = {n for n in PARTS[kind] if n.split(".")[1] == name.split(".")[1]} - {name, "w2.weight"}
            assert set(answer.missing_keys) >= {f"block.{n}" for n in siblings}
        assert all(p.requires_grad and p.is_leaf for p in block.parameters())


@pytest.mark.parametrize("kind", MODULES)
def test_assigned_parts_keep_their_dtype(kind):
    """As torch assigns other parameters: the checkpoint's dtype is the model's."""
    block, state = MODULES[kind](), MODULES[kind]().bfloat16().state_dict()
    block.load_state_dict(state, assign=True)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert all(torch.equal(v, state[k]) for k, v in block.state_dict().items())
    with torch.device("meta"):
        meta = MODULES[kind]()
    meta.load_state_dict(state, assign=True)
    assert all(torch.equal(v, state[k]) for k, v in meta.state_dict().items())
    with torch.device("meta"):
        meta = MODULES[kind]()
    first = PARTS[kind][0]
    with pytest.raises(
        GTPValueError, match=r"is on the meta device and takes all of its parts at once; .* are missing"
    ):
        meta.load_state_dict({first: state[first]}, strict=False, assign=True)


@pytest.mark.parametrize("kind", MODULES)
def test_torchs_functions_for_state_dicts(kind):
    """They follow the names of a state dict through the model, which has them as views."""
    model = nn.ModuleDict({"block": MODULES[kind]()})
    optimizer = torch.optim.AdamW(model.parameters())
    names = [f"block.{n}" for n in PARTS[kind]]
    state = get_model_state_dict(model)
    assert list(state) == names
    assert list(get_state_dict(model, optimizer)[0]) == names
    assert list(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))) == names
    wanted = {k: torch.full_like(v, float(i)) for i, (k, v) in enumerate(state.items())}
    set_model_state_dict(model, dict(wanted))
    assert all(torch.equal(v, wanted[k]) for k, v in model.state_dict().items())
    for name in PARTS[kind]:
        module, attribute = name.split(".")
        part = getattr(getattr(model["block"], module), attribute)
        assert torch.equal(part, wanted[f"block.{name}"])


def sharded() -> None:
    fused = FusedSwiGLU(8, 12)
    state = {k: v.clone() for k, v in fused.state_dict().items()}
    gtp.shard_model(fused, dist.group.WORLD)
    assert list(fused.state_dict()) == ["w13", "w2.weight"]
    assert not hasattr(fused, "w1")
    assert list(get_model_state_dict(fused)) == ["w13", "w2.weight"]
    for given in (state, {"w1.weight": state["w1.weight"]}):
        with pytest.raises(
            GTPValueError, match=r"w13 is sharded and cannot take the parts w1.weight.*before gtp.shard"
        ):
            fused.load_state_dict(given, strict=False)


def test_a_sharded_parameter_is_saved_whole_and_takes_no_parts(ranks):
    """Part of its parts is no way around it either."""
    ranks(2).run(sharded)

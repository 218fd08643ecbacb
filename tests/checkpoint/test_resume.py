"""Training that is saved and resumed is training that was never stopped; optimizer state moves between layouts.

Run one: `pytest tests/checkpoint/test_resume.py -k bf16`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import gtp
from gtp.checkpoint import ShardTensor, load_optimizer_state_dict, optimizer_state_dict
from gtp.errors import GTPValueError, UnsupportedError
from gtp.optim import Muon
from gtp.testing.ranks import rank, subgroup
from tests.checkpoint.models import ALIGNED, Net, assert_same_state, local, pair, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two groups, so that a parameter's settings must find it again."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [
        torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, amsgrad=True
        )
    ]


def momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)]


def muon_and_adamw(model: nn.Module, kind: type[torch.optim.Optimizer] = Muon) -> list[torch.optim.Optimizer]:
    hidden = [model.up.weight, model.down.weight]
    rest = [p for p in model.parameters() if not any(p is h for h in hidden)]
    return [kind(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS = {"adamw": adamw, "momentum": momentum, "muon": muon_and_adamw}


def _resume(path, kind):
    make = OPTIMIZERS[kind]
    _, straight = pair(config=ALIGNED)
    optimizers = make(straight)
    first = train(straight, optimizers, range(3), rank())
    gtp.checkpoint.save(path, straight, optimizers, step=3)
    second = train(straight, optimizers, range(3, 6), rank())

    _, resumed = pair(config=ALIGNED, seed=8)
    fresh = make(resumed)
    for optimizer in fresh:
        optimizer.param_groups[0]["lr"] = 99.0  # comes from the file
    assert gtp.checkpoint.load(path, resumed, fresh) == {"step": 3}
    assert train(resumed, fresh, range(3, 6), rank()) == second
    assert first != second
    assert_same_state(resumed, _plain(straight))
    for one, other in zip(optimizers, fresh, strict=True):
        assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    # saving changed nothing, and what was loaded can be saved: the second file holds what the first run has now
    gtp.checkpoint.save(path + "_again", resumed, fresh)
    _, again = pair(config=ALIGNED, seed=8)
    gtp.checkpoint.load(path + "_again", again, both := make(again))
    assert train(again, both, range(6, 8), rank()) == train(straight, optimizers, range(6, 8), rank())


def _plain(sharded):
    plain = Net()
    plain.load_state_dict(gtp.full_state_dict(sharded))
    return plain


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_three_steps_a_checkpoint_and_three_steps_are_six_steps(ranks, tmp_path, kind):
    ranks(2).run(_resume, str(tmp_path / kind), kind)


def _slope(path):
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.LayerNorm(8))
        gtp.shard_model(model, dist.group.WORLD, unshard="*")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank()))
    model(x).pow(2).sum().backward()
    optimizer.step()
    gtp.checkpoint.save(path, model, optimizer)
    loaded, fresh = build()
    gtp.checkpoint.load(path, loaded, fresh)
    fresh.load_state_dict(copy.deepcopy(fresh.state_dict()))
    for one, held in ((model, optimizer), (loaded, fresh)):
        one.zero_grad()
        one(x).pow(2).sum().backward()
        held.step()
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        assert optimizer.state[one]["step"] == fresh.state[other]["step"] == 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_sharded_parameter_of_one_element_has_a_step_count_too(ranks, tmp_path, size):
    """C20: its state was taken for rows where it is one number, and the file could not be loaded."""
    ranks(size).run(_slope, str(tmp_path / "slope"))


# -- other layouts -----------------------------------------------------------------------------------------------------


def _train_and_save(path, kind, config):
    _, sharded = pair(config=config)
    optimizers = OPTIMIZERS[kind](sharded)
    # the same data on every rank: the mean over ranks is what one process computes, at any power of two of them
    train(sharded, optimizers, range(2), 0)
    gtp.checkpoint.save(path, sharded, optimizers)


def _load_and_train(path, kind, config, members):
    group = subgroup(members)
    if group is None:
        return None
    _, sharded = pair(group, config, seed=3)
    optimizers = OPTIMIZERS[kind](sharded)
    gtp.checkpoint.load(path, sharded, optimizers, process_group=group)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, gtp.GTPWeight):
                shard_sized = [v for v in state.values() if v.dim() > 0]
                assert shard_sized
                assert all(tuple(v.shape) == parameter.layout.shard_shape for v in shard_sized)
    losses = train(sharded, optimizers, range(2, 5), 0)
    return losses, gtp.full_state_dict(sharded)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_moves_between_numbers_of_ranks_and_plain_models(ranks, tmp_path, kind):
    path = str(tmp_path / kind)
    ranks(4).run(_train_and_save, path, kind, ALIGNED)
    plain = Net()
    optimizers = muon_and_adamw(plain, torch.optim.Muon) if kind == "muon" else OPTIMIZERS[kind](plain)
    gtp.checkpoint.load(path, plain, optimizers)
    losses = train(plain, optimizers, range(2, 5), 0)
    for members, config in (((0, 1), gtp.GTPConfig()), ((2,), gtp.GTPConfig(alignment=4))):
        result = ranks(4).run(_load_and_train, path, kind, config, members)[members[0]]
        assert result[0] == losses
        assert all(torch.equal(result[1][k], v) for k, v in plain.state_dict().items() if isinstance(v, torch.Tensor))


def test_a_plain_models_optimizer_saved_by_torch_loads_into_ranks(ranks, tmp_path):
    path = str(tmp_path / "plain")
    plain = Net()
    optimizers = adamw(plain)
    train(plain, optimizers, range(2), 0)
    dcp.save({"model": plain.state_dict(), "optim": get_optimizer_state_dict(plain, optimizers[0])}, checkpoint_id=path)
    losses = train(plain, optimizers, range(2, 5), 0)
    for result in ranks(2).run(_load_and_train, path, "adamw", gtp.GTPConfig(), (0, 1)):
        assert result[0] == losses


# -- dtypes, names, refusals -------------------------------------------------------------------------------------------


def _keeps_dtype(path):
    model = nn.Sequential(nn.Linear(5, 6)).to(torch.bfloat16)
    copied = copy.deepcopy(model)
    for m in (model, copied):
        gtp.shard_model(m, subgroup((0, 1)), config=gtp.GTPConfig(grad_dtype=torch.float32))
    ours, theirs = Muon([model[0].weight], lr=0.1), Muon([copied[0].weight], lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(3, 5, dtype=torch.bfloat16)).square().sum().backward()
        ours.step()
        ours.zero_grad()
    buffer = ours.state[model[0].weight]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    gtp.checkpoint.save(path, model, ours)
    gtp.checkpoint.load(path, copied, theirs)
    loaded = theirs.state[copied[0].weight]["momentum_buffer"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.shard, buffer.shard)


def test_an_fp32_momentum_of_bf16_weights_is_not_rounded(ranks, tmp_path):
    ranks(2).run(_keeps_dtype, str(tmp_path / "bf16"))


def _by_name():
    plain, sharded = pair(config=ALIGNED)
    (optimizer,) = adamw(sharded)
    assert optimizer_state_dict(sharded, optimizer)["state"] == {}
    train(sharded, [optimizer], range(2), 0)
    state = optimizer_state_dict(sharded, optimizer)
    assert set(state["state"]) == {n for n, _ in sharded.named_parameters()}
    assert isinstance(state["state"]["up.weight"]["exp_avg"], ShardTensor)
    assert state["state"]["up.weight"]["exp_avg"].shape == (70, 8)
    assert state["state"]["up.weight"]["step"] == 2
    assert [len(g["params"]) for g in state["param_groups"]] == [4, 4]
    # full tensors, as a plain model's optimizer has them, are cut
    (other,) = adamw(plain)
    train(plain, [other], range(1), 0)
    load_optimizer_state_dict(sharded, optimizer, optimizer_state_dict(plain, other))
    after = optimizer_state_dict(sharded, optimizer)["state"]
    for name, parameter in plain.named_parameters():
        for key, value in other.state[parameter].items():
            got = after[name][key]
            assert torch.equal(got.full_tensor() if isinstance(got, ShardTensor) else got, value), (name, key)


def test_optimizer_state_is_named_by_parameter_and_full_tensors_are_cut(ranks):
    ranks(2).run(_by_name)


def _named_parameters(path):
    _, sharded = pair()
    optimizer = torch.optim.AdamW(sharded.named_parameters())
    train(sharded, [optimizer], range(1), 0)
    gtp.checkpoint.save(path, sharded, optimizer)
    backwards = list(sharded.named_parameters())[::-1]
    for given, names in ((backwards, [n for n, _ in backwards]), ([p for _, p in backwards], None)):
        other = torch.optim.AdamW(given)
        gtp.checkpoint.load(path, sharded, other)
        assert other.param_groups[0].get("param_names") == names
        for name, parameter in backwards:
            assert torch.equal(
                local(other.state[parameter]["exp_avg"]), local(optimizer.state[parameter]["exp_avg"])
            ), name


def test_an_optimizer_keeps_the_names_it_gave_its_parameters(ranks, tmp_path):
    """Its own, in its own order: state was right, and the names beside it were those of the file's order."""
    ranks(2).run(_named_parameters, str(tmp_path / "file"))


def _under_inference_mode(path):
    _, straight = pair()
    optimizers = adamw(straight)
    train(straight, optimizers, range(2), rank())
    with torch.inference_mode():
        gtp.checkpoint.save(path, straight, optimizers, average=straight.up.bias)
    _, resumed = pair(seed=8)
    with torch.inference_mode():
        extra = gtp.checkpoint.load(path, resumed, fresh := adamw(resumed))
        kept = copy.deepcopy(optimizer_state_dict(straight, optimizers))
    assert not extra["average"].is_inference()
    _, again = pair()
    again.load_state_dict(straight.state_dict())
    load_optimizer_state_dict(again, own := adamw(again), kept)
    assert train(resumed, fresh, range(2, 4), rank()) == (losses := train(straight, optimizers, range(2, 4), rank()))
    assert train(again, own, range(2, 4), rank()) == losses


def test_what_was_loaded_under_inference_mode_is_trained(ranks, tmp_path):
    """Its state was of inference tensors, which the next step could not write."""
    ranks(2).run(_under_inference_mode, str(tmp_path / "file"))


def _rows_of_one_rank(path):
    _, sharded = pair()
    (optimizer,) = adamw(sharded)
    train(sharded, [optimizer], range(1), rank())
    text = r"embedding\.weight, exp_avg: rank 0 saves its rows, and ranks \[1\].*same optimizers"
    with pytest.raises(GTPValueError, match=text):
        gtp.checkpoint.save(path, sharded, optimizer if rank() == 0 else None)
    if rank() == 0:
        optimizer.state.pop(sharded.up.weight)
    with pytest.raises(GTPValueError, match=r"up\.weight, exp_avg: rank 1 saves its rows, and ranks \[0\]"):
        gtp.checkpoint.save(path, sharded, optimizer)


def test_state_of_which_a_rank_has_no_rows_is_not_saved(ranks, tmp_path):
    """torch said "Failed to validate global plan"."""
    ranks(2).run(_rows_of_one_rank, str(tmp_path / "file"))


class _RowFactors(torch.optim.Optimizer):
    """Keeps one number per row, as factored optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(parameter.shape[0])


def _refusals(path):
    plain, sharded = pair()
    with pytest.raises(GTPValueError, match=r"SGD holds 8 parameters that the model does not have"):
        optimizer_state_dict(sharded, torch.optim.SGD(plain.parameters()))
    two = [torch.optim.SGD(sharded.parameters()), torch.optim.AdamW([sharded.up.weight])]
    with pytest.raises(GTPValueError, match=r"up\.weight: it is in two optimizers, SGD and AdamW"):
        gtp.checkpoint.save(path, sharded, two)
    factored = _RowFactors([sharded.up.weight], {})
    factored.step()
    with pytest.raises(UnsupportedError, match=r"up\.weight: rows: state of shape \(35,\)"):
        gtp.checkpoint.save(path, sharded, factored)
    (optimizer,) = adamw(sharded)
    train(sharded, [optimizer], range(1), 0)
    gtp.checkpoint.save(path, sharded, optimizer)
    with pytest.raises(GTPValueError, match=r"only the file has .*\. To load what both have pass strict=False"):
        gtp.checkpoint.load(path, sharded, torch.optim.AdamW([sharded.up.weight]))
    with pytest.raises(GTPValueError, match=r"embedding\.weight: its parameter group takes parameters from 2 saved"):
        gtp.checkpoint.load(path, sharded, torch.optim.AdamW(sharded.parameters()))
    some = torch.optim.AdamW([sharded.up.weight])
    gtp.checkpoint.load(path, sharded, some, strict=False)
    assert some.param_groups[0]["weight_decay"] == 0.1
    other = torch.optim.SGD([sharded.up.weight], lr=0.3)
    with pytest.raises(GTPValueError, match=r"have no momentum, dampening, which SGD needs.*optimizer=None"):
        gtp.checkpoint.load(path, sharded, other, strict=False)
    assert other.param_groups[0]["lr"] == 0.3
    assert not other.state
    state = optimizer_state_dict(sharded, optimizer)
    state["state"]["up.weight"]["exp_avg"] = torch.zeros(35, 8)  # of a model of half the width, or this rank's rows
    with pytest.raises(GTPValueError, match=r"up\.weight: exp_avg: .* shape \(35, 8\); a full tensor has \(70, 8\)"):
        load_optimizer_state_dict(sharded, optimizer, state)
    state = optimizer_state_dict(sharded, optimizer)
    state["param_groups"][0]["params"].remove("up.weight")
    with pytest.raises(GTPValueError, match=r"up\.weight: in no parameter group of the saved optimizer state"):
        load_optimizer_state_dict(sharded, optimizer, state)


def test_optimizers_that_do_not_fit_are_refused_by_name(ranks, tmp_path):
    ranks(2).run(_refusals, str(tmp_path / "refused"))


def test_saving_an_optimizer_before_its_first_step_does_not_take_one(tmp_path):
    """torch's own get_optimizer_state_dict fills fresh state by a step with zero gradients: its count starts at one."""
    model = Net()
    (optimizer,) = adamw(model)
    gtp.checkpoint.save(tmp_path / "fresh", model, optimizer)
    assert len(optimizer.state) == 0
    gtp.checkpoint.load(tmp_path / "fresh", model, optimizer)
    train(model, [optimizer], range(1), 0)
    assert optimizer.state[model.up.weight]["step"] == 1


def test_a_compiled_models_names_are_the_models_own(tmp_path):
    model = Net()
    wrapped = torch.nn.Module()
    wrapped.add_module("_orig_mod", model)  # how torch.compile nests a model
    (optimizer,) = adamw(wrapped)
    train(model, [optimizer], range(1), 0)
    gtp.checkpoint.save(tmp_path / "compiled", wrapped, optimizer)
    other = Net()
    gtp.checkpoint.load(tmp_path / "compiled", other, adamw(other))
    assert torch.equal(other.up.weight, model.up.weight)
    gtp.checkpoint.load(tmp_path / "compiled", wrapped, optimizer)

"""Checkpoints through files: what torch.distributed.checkpoint (DCP) writes of a sharded model, and who can read it.

Weights are filled with their global element index, so a row that moved is a wrong number. Files are written by one
pool of ranks and read by other numbers of ranks, and by this process, which has no ranks. Run one: `pytest
tests/checkpoint/test_dcp.py -k reshard`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import gtp
from gtp.errors import GTPValueError, UnsupportedError
from gtp.testing.ranks import rank, subgroup
from tests.checkpoint.models import ALIGNED, SHARDED, Net, assert_same_state, local, numbered, pair, train

# one process without ranks is a case of its own, and DCP says that it noticed
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

HAS_LOCAL_TENSOR_PROTOCOL = hasattr(dcp, "protocol")  # torch >= 2.14 loads a local tensor as rows of a larger one


def loaded_plain(path: str) -> Net:
    """The plain model, loaded by torch alone from the `model` entry of a checkpoint."""
    model = Net()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return model


def chunks_of(path: str) -> dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Per sharded weight its saved global shape and the rows of each chunk."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        n: (
            tuple(entries[f"model.{n}"].size),
            sorted((c.offsets[0], c.offsets[0] + c.sizes[0]) for c in entries[f"model.{n}"].chunks),
        )
        for n in SHARDED
    }


def _save(path, config, start=0):
    _, sharded = pair(config=config)
    numbered(sharded.norm, start)
    sharded.load_state_dict(numbered(Net(), start).state_dict())
    sharded.counter.seen = {"batches": start, "name": "saved"}
    gtp.checkpoint.save(path, sharded)


def _load(path, config, start=0, members=None):
    """`members`: the ranks of the pool that load; fewer than it has stand for a smaller job."""
    group = dist.group.WORLD if members is None else subgroup(members)
    if group is None:
        return
    _, sharded = pair(group, config, seed=5)
    gtp.checkpoint.load(path, sharded, process_group=group)
    expected = numbered(Net(), start)
    expected.counter.seen = {"batches": start, "name": "saved"}
    assert_same_state(sharded, expected)


# -- resharding --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(ranks, tmp_path_factory):
    """A checkpoint that four ranks wrote, with alignment 16."""
    path = str(tmp_path_factory.mktemp("checkpoint") / "four")
    ranks(4).run(_save, path, ALIGNED, 100)
    return path


def test_a_file_has_the_logical_shapes_and_no_padding(four):  # C28
    assert chunks_of(four) == {
        "embedding.weight": ((10, 8), [(0, 10)]),
        "gate.weight": ((1, 8), [(0, 1)]),
        "up.weight": ((70, 8), [(0, 32), (32, 64), (64, 70)]),
        "down.weight": ((7, 70), [(0, 7)]),
    }
    plain, expected = loaded_plain(four), numbered(Net(), 100)
    for key, value in expected.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(plain.state_dict()[key], value), key
    assert plain.counter.seen == {"batches": 100, "name": "saved"}


@pytest.mark.parametrize(
    "members, config",
    [((0, 1), ALIGNED), ((0, 1, 2), gtp.GTPConfig()), ((0,), gtp.GTPConfig(alignment=4)), ((0, 1, 2, 3), ALIGNED)],
    ids=["two", "three", "one", "four"],
)
def test_a_checkpoint_of_four_ranks_reshards(ranks, four, members, config):  # C28
    ranks(4).run(_load, four, config, 100, members)


def test_another_job_loads_the_checkpoint(ranks, four):
    ranks(2).run(_load, four, gtp.GTPConfig(), 100)


def test_a_plain_models_checkpoint_loads_into_ranks_and_into_the_plain_model(ranks, tmp_path):
    path = str(tmp_path / "plain")
    model = numbered(Net(), 7)
    model.counter.seen = {"batches": 7, "name": "saved"}
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    ranks(4).run(_load, path, ALIGNED, 7, (1, 2, 3))
    fresh = Net()
    assert gtp.checkpoint.load(path, fresh) == {}
    assert torch.equal(fresh.up.weight, model.up.weight)


def _raw_dcp(path):
    _, sharded = pair()
    numbered_state = numbered(Net()).state_dict()
    sharded.load_state_dict(numbered_state)
    # a module is a Stateful: DCP calls state_dict and load_state_dict itself
    dcp.save({"model": sharded, "weights": dict(sharded.named_parameters())}, checkpoint_id=path)
    sharded.load_state_dict(Net().state_dict())
    dcp.load({"model": sharded}, checkpoint_id=path)
    assert torch.equal(sharded.up.weight.full_tensor(), numbered_state["up.weight"])


def test_plain_dcp_saves_rows_of_modules_and_of_parameters(ranks, tmp_path):
    path = str(tmp_path / "raw")
    ranks(2).run(_raw_dcp, path)
    assert torch.equal(loaded_plain(path).down.weight, numbered(Net()).down.weight)
    weights = {"weights": {"up.weight": torch.zeros(70, 8)}}
    dcp.load(weights, checkpoint_id=path)
    assert torch.equal(weights["weights"]["up.weight"], numbered(Net()).up.weight)


# -- who writes --------------------------------------------------------------------------------------------------------


def _save_on_mesh(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    _, sharded = pair(mesh)
    sharded.load_state_dict(numbered(Net()).state_dict())
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    train(sharded, [optimizer], range(1), rank())
    numbered(sharded.norm)
    gtp.checkpoint.save(
        path, sharded, optimizer, step=3, schedule={"milestones": {30: 1, 80: 2}}, **{f"only{rank()}": {"rank": rank()}}
    )
    _, other = pair(mesh, seed=9)
    fresh = torch.optim.AdamW(other.parameters(), lr=5.0)
    extra = gtp.checkpoint.load(path, other, fresh)
    assert_same_state(other, _plain_of(sharded))
    for a, b in zip(sharded.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(local(value), local(fresh.state[b][key])), key
    return extra


def _plain_of(sharded):
    plain = Net()
    plain.load_state_dict(gtp.full_state_dict(sharded))
    return plain


def test_with_replicas_each_row_and_each_replicated_tensor_is_written_once(ranks, tmp_path):  # C30, C32
    path = str(tmp_path / "mesh")
    for extra in ranks(4).run(_save_on_mesh, path):
        # dicts without tensors come back as they were; DCP alone would make the keys strings
        assert extra["schedule"] == {"milestones": {30: 1, 80: 2}}
        assert extra["step"] == 3
        assert [extra[f"only{r}"] for r in range(4)] == [{"rank": r} for r in range(4)]
    metadata = dcp.FileSystemReader(path).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            assert sum(c.sizes.numel() for c in entry.chunks) == entry.size.numel(), key
            assert len({c.offsets for c in entry.chunks}) == len(entry.chunks), key
    written = [(i.fqn, i.offset) for i in metadata.storage_data]
    assert len(written) == len(set(written))
    assert {k.removeprefix("model.") for k in metadata.state_dict_metadata if k.startswith("model.")} == {
        *(k for k in Net().state_dict() if k != "counter._extra_state"),
        "counter._extra_state.batches",
        "counter._extra_state.name",
    }


def _save_in_subgroup(path):
    group = subgroup((1, 3))
    if group is not None:
        _, sharded = pair(group)
        sharded.load_state_dict(numbered(Net()).state_dict())
        gtp.checkpoint.save(path, sharded, process_group=group)
        sharded.load_state_dict(Net().state_dict())
        gtp.checkpoint.load(path, sharded, process_group=group)
        assert torch.equal(sharded.up.weight.full_tensor(), numbered(Net()).up.weight)


def test_a_subgroup_saves_by_itself(ranks, tmp_path):
    path = str(tmp_path / "subgroup")
    ranks(4).run(_save_in_subgroup, path)
    assert torch.equal(loaded_plain(path).up.weight, numbered(Net()).up.weight)


def _two_sets_of_ranks(path):
    half = [subgroup((0, 1)), subgroup((2, 3))][rank() // 2]
    _, sharded = pair(half)
    with pytest.raises(GTPValueError, match=r"embedding\.weight: ranks \[0, 1\] and ranks \[2, 3\] each hold a weight"):
        gtp.checkpoint.save(path, sharded)
    gtp.checkpoint.save(f"{path}{rank() // 2}", sharded, process_group=half)
    # stages of a pipeline: other names
    stage = torch.nn.ModuleDict({f"stage{rank() // 2}": sharded.up})
    gtp.checkpoint.save(f"{path}_stages", stage)
    gtp.checkpoint.load(f"{path}_stages", stage, strict=False)


def test_different_weights_of_one_name_are_not_written_to_one_file(ranks, tmp_path):  # C32
    path = str(tmp_path / "sets")
    ranks(4).run(_two_sets_of_ranks, path)
    saved = dcp.FileSystemReader(path + "_stages").read_metadata().state_dict_metadata
    assert sorted(saved) == [f"model.stage{i}.{n}" for i in (0, 1) for n in ("bias", "weight")]


# -- refusals ----------------------------------------------------------------------------------------------------------


class _Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(8, 8)


def _refusals(path):
    plain, sharded = pair(rows=11)
    with pytest.raises(GTPValueError, match=r"embedding\.weight: .* holds shape \(10, 8\).* here is \(11, 8\)"):
        gtp.checkpoint.load(path, sharded)
    assert_same_state(sharded, plain)
    with pytest.raises(GTPValueError, match="no checkpoint there"):
        gtp.checkpoint.load(path + "/missing", sharded)
    with pytest.raises(GTPValueError, match="'optim' names a part of every checkpoint"):
        gtp.checkpoint.save(path, sharded, optim=1)
    _, sharded = pair()
    with pytest.raises(GTPValueError, match="no entry 'optim': it was saved without optimizer"):
        gtp.checkpoint.load(path, sharded, torch.optim.SGD(sharded.parameters()))
    with torch.device("meta"):
        empty = Net()
    for call in (gtp.checkpoint.load, gtp.checkpoint.save):
        with pytest.raises(GTPValueError, match=r"embedding\.weight: it is on the meta device.*to_empty"):
            call(path, empty)
    wider = _Wider()
    gtp.shard_model(wider, dist.group.WORLD)
    with pytest.raises(GTPValueError, match=r"only the model has extra\.bias, extra\.weight.*strict=False"):
        gtp.checkpoint.load(path, wider)
    kept = wider.extra.weight.full_tensor()
    gtp.checkpoint.load(path, wider, strict=False)
    assert torch.equal(wider.up.weight.full_tensor(), numbered(Net()).up.weight)
    assert torch.equal(wider.extra.weight.full_tensor(), kept)


def _one_rank_sees_no_file(path):
    plain, sharded = pair()
    gtp.checkpoint.save(path, sharded)
    mine = "no checkpoint there" if rank() else r"gtp\.checkpoint\.load: rank 1 of 2 raised .*no checkpoint there"
    with pytest.raises(GTPValueError, match=mine):
        gtp.checkpoint.load(path + "/missing" if rank() else path, sharded)
    assert_same_state(sharded, plain)
    gtp.checkpoint.load(path, sharded)


def _other_folders(path):
    _, sharded = pair()
    text = r"\d of the checkpoint's \d files, which other ranks wrote, are not there \(__1_0\.distcp\).*same path"
    with pytest.raises(GTPValueError, match=text):
        gtp.checkpoint.save(f"{path}/{rank()}", sharded)
    gtp.checkpoint.save(f"{path}/all", sharded)


def test_rows_that_a_rank_wrote_elsewhere_are_missed_when_they_are_saved(ranks, tmp_path):
    """Names from the time, folders of one machine: nothing was said before the checkpoint was needed."""
    ranks(2).run(_other_folders, str(tmp_path))


def test_what_one_rank_cannot_load_is_an_error_on_every_rank(ranks, tmp_path):
    """A folder of this machine alone: the other ranks waited for the one that does not find it."""
    ranks(2).run(_one_rank_sees_no_file, str(tmp_path / "file"))


def test_what_does_not_fit_a_file_is_refused_before_anything_changes(ranks, tmp_path):  # C28
    path = str(tmp_path / "file")
    ranks(2).run(_save, path, gtp.GTPConfig())
    ranks(2).run(_refusals, path)
    bare = str(tmp_path / "bare")
    dcp.save(Net().state_dict(), checkpoint_id=bare)
    with pytest.raises(GTPValueError, match=r"no entry 'model' \(top-level entries: embedding\.weight"):
        gtp.checkpoint.load(bare, Net())


# -- torch's own helpers -----------------------------------------------------------------------------------------------


def _model_helpers():
    plain, sharded = pair(config=ALIGNED)
    shown = get_model_state_dict(sharded)
    assert list(shown) == list(plain.state_dict())
    other = numbered(Net())
    set_model_state_dict(sharded, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same_state(sharded, other)
    set_model_state_dict(sharded, get_model_state_dict(sharded))
    assert_same_state(sharded, other)
    source = plain.state_dict() if rank() == 0 else {}
    set_model_state_dict(
        sharded, source, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )
    for name in SHARDED:
        assert torch.equal(sharded.get_parameter(name).full_tensor(), plain.get_parameter(name))
    moved = get_model_state_dict(sharded, options=StateDictOptions(cpu_offload=True))
    assert torch.equal(moved["up.weight"].full_tensor(), plain.up.weight)
    # torch does not know how to gather these: the values stay shards, and say so when they are used
    full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(UnsupportedError, match=r"embedding\.weight: .*gtp\.full_state_dict"):
        torch.save(full, "/dev/null")


def test_torchs_model_state_dict_helpers(ranks):
    ranks(2).run(_model_helpers)


def _optimizer_helpers(path):
    _, sharded = pair(config=ALIGNED)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    train(sharded, [optimizer], range(2), rank())
    state = get_optimizer_state_dict(sharded, optimizer)
    dcp.save({"model": get_model_state_dict(sharded), "optim": state}, checkpoint_id=path)
    with pytest.raises(UnsupportedError, match=r"this is rows .*gtp\.checkpoint\.save"):
        torch.save(optimizer.state_dict(), "/dev/null")
    _, other = pair(config=ALIGNED, seed=4)
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-3)
    template = {"optim": get_optimizer_state_dict(other, fresh)}
    if HAS_LOCAL_TENSOR_PROTOCOL:
        dcp.load(template, checkpoint_id=path)
        set_optimizer_state_dict(other, fresh, template["optim"])
    else:
        with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
            dcp.load(template, checkpoint_id=path)
        fresh = torch.optim.AdamW(other.parameters(), lr=1e-3)
        gtp.checkpoint.load(path, other, fresh)
    for a, b in zip(sharded.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(local(value), local(fresh.state[b][key])), key


def test_torchs_optimizer_state_dict_helpers(ranks, tmp_path):
    path = str(tmp_path / "helpers")
    ranks(2).run(_optimizer_helpers, path)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert optimizer.state[model.up.weight]["step"] == 2
    assert optimizer.state[model.up.weight]["exp_avg"].abs().min() > 0


def _async(path):
    _, sharded = pair()
    sharded.load_state_dict(numbered(Net()).state_dict())
    future = dcp.async_save({"model": sharded.state_dict()}, checkpoint_id=path)
    sharded.load_state_dict(Net().state_dict())
    future.result()


def test_async_save_stages_a_copy_of_the_rows(ranks, tmp_path):
    path = str(tmp_path / "async")
    ranks(2).run(_async, path)
    assert torch.equal(loaded_plain(path).up.weight, numbered(Net()).up.weight)

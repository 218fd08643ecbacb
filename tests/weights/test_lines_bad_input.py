"""Wrong use fails at the call that is wrong, on every rank alike, with what was given, what is allowed, what to do."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gtp
from gtp.modules import GroupedLinear
from gtp.testing.collectives import collective_log
from gtp.testing.ranks import rank, subgroup
from tests.reference import full
from tests.weights.side_by_side import SideBySide, inputs, square


def _model():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6))


# --- without ranks

BAD_CONFIGS = [
    ({"alignment": 0}, r"GTPConfig\.alignment must be an integer >= 1, got 0"),
    ({"alignment": -2}, r"alignment must be an integer >= 1, got -2"),
    ({"alignment": 1.0}, r"alignment must be an integer >= 1, got 1\.0"),
    ({"prefetch_bytes": -1}, r"prefetch_bytes must be None or an integer >= 0, got -1"),
    ({"keep_bytes": None}, r"keep_bytes must be an integer >= 0, got None"),
    ({"min_numel": True}, r"min_numel must be an integer >= 0, got True"),
    ({"reduce_sms": 0}, r"reduce_sms must be an integer >= 1, got 0"),
    ({"map_shards": None}, r"map_shards must be True or False, got None"),
    ({"grad_reduce": "avg"}, r"grad_reduce must be one of 'mean', 'sum', got 'avg'"),
    ({"transport": "nccl"}, r"transport must be one of 'auto', 'process_group', 'copy_engine', got 'nccl'"),
    ({"param_dtype": torch.int8}, r"param_dtype must be None or one of torch\.float32, .*, got torch\.int8"),
    ({"grad_dtype": "float32"}, r"grad_dtype must be None or one of .*, got 'float32'"),
    ({"reduce_dtype": torch.float8_e4m3fn}, r"reduce_dtype must be None or one of .*, got torch\.float8_e4m3fn"),
    ({"debug": 1}, r"debug must be True or False, got 1"),
    ({"debug_timeout": 0}, r"debug_timeout must be a number of seconds above 0, got 0"),
    ({"peer_timeout": "10"}, r"peer_timeout must be a number of seconds above 0, got '10'"),
    ({"prefetch_byte": 0}, r"GTPConfig has no field 'prefetch_byte': did you mean prefetch_bytes or .*Fields are "),
    ({"zzz": 0}, r"GTPConfig has no field 'zzz': Fields are prefetch_bytes, keep_bytes, "),
]


@pytest.mark.parametrize("fields, message", BAD_CONFIGS, ids=[str(f) for f, _ in BAD_CONFIGS])
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(fields, message):
    with pytest.raises(gtp.GTPValueError, match=message):
        gtp.GTPConfig(**fields)


def test_settings_are_named_and_never_change():
    with pytest.raises(gtp.GTPValueError, match=r"takes keyword arguments only, got 1 positional"):
        gtp.GTPConfig(1)
    with pytest.raises(AttributeError):
        gtp.GTPConfig().alignment = 4


def test_without_a_process_group_the_message_says_how_to_make_one():
    assert not dist.is_initialized()
    with pytest.raises(gtp.GTPValueError, match=r"initialized process group: call .*init_process_group.*group\.WORLD"):
        gtp.shard_model(_model(), None)
    with pytest.raises(gtp.GTPValueError, match="initialized process group"):
        gtp.shard_model(_model(), {"*": None})
    with pytest.raises(gtp.GTPValueError, match="initialized process group"):
        gtp.data_size(None)


# --- what is sharded


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(8, 8)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))


def _inferred():
    with torch.inference_mode():
        return nn.Linear(4, 4)


def _refused_parameters():
    world = dist.group.WORLD
    cases = [
        ({"include": "scalar"}, r"scalar: a weight is sharded along its rows \(dim 0\), and shape \(\) has none"),
        ({"include": "none"}, r"none: a weight is sharded along its rows \(dim 0\), and shape \(0, 3\) has none"),
        ({"include": ["counts"]}, r"counts: only floating point weights can be sharded, got torch\.int64.*include"),
        ({"include": "fin.weight"}, r"include pattern 'fin\.weight' matches no parameter\. Near names: fine\.weight"),
        (
            {"exclude": ["fine.*", "fine.wieght"]},
            r"exclude pattern 'fine\.wieght' .*Near names: fine\.weight",
        ),
        ({"include": "zzz.*"}, r"Near names: .*named_parameters\(\)\]"),
        ({"include": [3]}, r"include takes name patterns \(strings\), got 3"),
        ({"exclude": "*"}, r"found nothing to shard.*fine\.weight: excluded by name"),
        ({"config": gtp.GTPConfig(min_numel=65)}, r"found nothing to shard.*64 elements, below min_numel=65"),
        ({"config": {"alignment": 2}}, r"config must be a GTPConfig, got dict: write gtp\.GTPConfig"),
        ({"device": "meta"}, r"device='meta' is for models on the meta device; this one is on cpu"),
        ({"init": lambda name, tensor: tensor.zero_()}, r"init= .*it would never be called.*before gtp\.shard_model"),
    ]
    for options, message in cases:
        model = Odd()
        with pytest.raises(gtp.GTPValueError, match=re.compile(message, re.DOTALL)):
            gtp.shard_model(model, world, **options)
        assert not any(isinstance(p, gtp.GTPWeight) for p in model.parameters())
    with pytest.raises(gtp.GTPValueError, match=r"takes an nn\.Module, got list.*nn\.ModuleList"):
        gtp.shard_model([_model()], world)
    with pytest.raises(gtp.GTPValueError, match=r"made under torch\.inference_mode and can never be trained"):
        gtp.shard_model(_inferred(), world, include="weight")
    model = _model()
    square(model, inputs(0, 2, 8)[rank()]).backward()
    with pytest.raises(gtp.GTPStateError, match=r"0\.weight: it holds a gradient.*zero_grad"):
        gtp.shard_model(model, world)
    # the advice is followed
    model.zero_grad()
    gtp.shard_model(model, world)
    model = Odd()
    report = gtp.shard_model(model, world).report
    assert {line.name for line in report.lines if line.sharded} == {"fine.weight"}


def test_parameters_and_patterns_that_cannot_work_are_named(ranks):
    """C91."""
    ranks(2).run(_refused_parameters)


def _twice():
    world, alone = dist.group.WORLD, [subgroup((0,)), subgroup((1,))][rank()]
    child = nn.Linear(8, 8)
    parent = nn.Sequential(child, nn.Linear(8, 8))
    gtp.shard_model(child, world)
    start = full(child.weight)
    for model, group, name in ((child, world, "weight"), (parent, world, "0.weight"), (parent, alone, "0.weight")):
        with pytest.raises(gtp.GTPStateError, match=rf"{name} is sharded already. Shard a model once, from its root"):
            gtp.shard_model(model, group)
    other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    gtp.shard_model(other, world)
    with pytest.raises(gtp.GTPStateError, match=r"weight is sharded already"):
        gtp.shard_model(other[1], world)
    # what was refused changed nothing
    assert not isinstance(parent[1].weight, gtp.GTPWeight)
    assert torch.equal(full(child.weight), start)
    square(parent, inputs(0, 2, 8)[rank()]).backward()
    square(other, inputs(0, 2, 8)[rank()]).backward()


def test_a_model_is_sharded_once(ranks):
    """C91."""
    ranks(2).run(_twice)


def _distributed_by_others():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fsdp, tensor_parallel, placed = _model(), _model(), _model()
    fully_shard(fsdp, mesh=mesh)
    parallelize_module(tensor_parallel, mesh, {"2": ColwiseParallel()})
    placed[0].bias = nn.Parameter(distribute_tensor(placed[0].bias.detach(), mesh, [Replicate()]))
    for model, name in ((fsdp, "0.weight"), (tensor_parallel, "2.weight"), (placed, "0.bias")):
        with pytest.raises(gtp.GTPValueError, match=rf"{name} is a DTensor: it is distributed by another library"):
            gtp.shard_model(model, mesh)
        assert not any(isinstance(p, gtp.GTPWeight) for p in model.parameters())
    sharded = _model()
    gtp.shard_model(sharded, mesh)
    value = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)])
    with pytest.raises(gtp.UnsupportedError, match=r"0\.weight: the state dict holds a DTensor.*full_tensor\(\)"):
        sharded.load_state_dict({"0.weight": value}, strict=False)
    assert isinstance(value, DTensor)


def test_parameters_of_other_libraries_are_refused_by_name(ranks):
    ranks(2).run(_distributed_by_others)


# --- what is done with a weight


def _tied_product(w, x):
    return x @ w.t()


FUNCTIONS = {
    "add": lambda w, x: w + 1,
    "radd": lambda w, x: 1 + w,
    "multiply": lambda w, x: w * w,
    "negate": lambda w, x: -w,
    "index": lambda w, x: w[0],
    "slice": lambda w, x: w[1:3],
    "mask": lambda w, x: w[w > 0],
    "matmul": lambda w, x: x @ w,
    "transposed": _tied_product,
    "T": lambda w, x: w.T,
    "mT": lambda w, x: w.mT,
    "sum": lambda w, x: w.sum(),
    "mean": lambda w, x: torch.mean(w),
    "norm": lambda w, x: w.norm(),
    "vector_norm": lambda w, x: torch.linalg.vector_norm(w),
    "max": lambda w, x: w.max(),
    "view": lambda w, x: w.view(-1),
    "cat": lambda w, x: torch.cat([w, w]),
    "stack": lambda w, x: torch.stack([w]),
    "chunk": lambda w, x: w.chunk(2),
    "einsum": lambda w, x: torch.einsum("bi,oi->bo", x, w),
    "bilinear": lambda w, x: F.bilinear(x, x, w[None]),
    "normalize": lambda w, x: F.normalize(w, dim=1),
    "cross_entropy": lambda w, x: F.cross_entropy(w, torch.zeros(8, dtype=torch.long)),
    "iterate": lambda w, x: list(w),
    "tolist": lambda w, x: w.tolist(),
    "numpy": lambda w, x: w.numpy(),
    "item": lambda w, x: w.item(),
    "setitem": lambda w, x: w.__setitem__(0, 1.0),
    "svd": lambda w, x: torch.linalg.svd(w),
    "topk": lambda w, x: w.topk(1),
    "equal": lambda w, x: torch.equal(w, w),
}


def _full_weight_functions():
    """In grad mode; no rank sends anything, and the weight stays usable."""
    twins = SideBySide(_model)
    weight = twins.sharded[0].weight
    x = torch.ones(3, 8)
    twins.step(inputs(0, 3, 8))
    silent = {}
    with collective_log() as log:
        for name, function in FUNCTIONS.items():
            try:
                silent[name] = function(weight, x)
            except gtp.UnsupportedError as error:
                text = str(error)
                assert "sharded weight '0.weight'" in text, name
                assert "full_tensor()" in text, name
    assert not silent, f"answered from one rank's rows: {sorted(silent)}"
    assert log.records == []
    twins.step(inputs(1, 3, 8))


def test_functions_that_need_the_whole_weight_say_so_and_send_nothing(ranks):
    """C65."""
    ranks(2).run(_full_weight_functions)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = GroupedLinear(3, 8, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts(x, [1, 0, 2]))


def _misused_contract():
    """Calls that break the contract from the caller's side: refused before any rank waits for another."""
    world = dist.group.WORLD
    for options in ({"include": ["experts.weight1", "last.*"]}, {"exclude": "experts.weight2"}):
        with pytest.raises(gtp.GTPValueError, match=r"experts\.weight.: its module uses 3 weights as one group"):
            gtp.shard_model(Experts(), world, **options)
    model = Experts()
    gtp.shard_model(model, world)
    first, second, last = model.experts.weight0, model.experts.weight1, model.last.weight
    full = torch.zeros(6, 8)
    cases = [
        (lambda: first.finalize_group_grads([full]), r"experts\.weight0: finalize got 1 wgrads for 3 weights"),
        (lambda: last.finalize_group_grads([full, full]), r"last\.weight: finalize got 2 wgrads for 1 weights"),
        (lambda: last.finalize_group_grads(full), r"a wgrad has the logical shape \(6, 6\), got \(6, 8\)"),
        (lambda: second.materialize_group_for_forward(), r"weight1: it is gathered together with experts\.weight0"),
        (lambda: F.linear(torch.ones(1, 8), second), r"use the group as a whole \(gtp\.ops\.grouped_linear\)"),
    ]
    with collective_log() as log:
        for call, message in cases:
            with pytest.raises(gtp.GTPError, match=message):
                call()
    assert log.records == []
    with pytest.raises(gtp.UnsupportedError, match=r"register_hook would never be called.*post_accumulate_grad_hook"):
        last.register_hook(lambda grad: grad)
    square(model, inputs(0, 3, 8)[rank()]).backward()
    return [tuple(p.grad.shape) for p in model.parameters()]


def test_a_caller_that_breaks_the_contract_is_told(ranks):
    assert ranks(2).run(_misused_contract) == [[(3, 8), (3, 8), (3, 8), (3, 6)]] * 2

"""Transforms, wrappers and converters of torch that would take a shard for the weight are refused by name."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate import replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import gtp
from gtp.modules import Linear
from gtp.testing.ranks import rank, subgroup
from tests.reference import assert_same_parameters
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs


def _model():
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


# --- transforms


def _transforms():
    twins = SideBySide(_model)
    weight = twins.sharded[1].weight
    xs = torch.stack(inputs(0, 3, 6, count=4))
    given = r"'1\.weight'.* was given to torch\.vmap.*batch dimension in place of vmap"
    for shard in (weight, weight.data, torch.zeros_like(weight)):
        for in_dim in (0, 1, -1):
            with pytest.raises(gtp.UnsupportedError, match=given):
                torch.vmap(lambda row: row.sum(), in_dims=in_dim)(shard)
    uses = {
        "linear": lambda: torch.vmap(lambda x: F.linear(x, weight))(xs),
        "linear, no grad": torch.no_grad()(lambda: torch.vmap(lambda x: F.linear(x, weight))(xs)),
        "module": lambda: torch.vmap(twins.sharded[1])(xs),
        "embedding": lambda: torch.vmap(lambda i: F.embedding(i, weight))(torch.zeros(4, 2, dtype=torch.long)),
        "arithmetic": lambda: torch.vmap(lambda x: x + weight.data)(torch.ones(4, 5, 6)),
        "grad": lambda: torch.func.grad(lambda x: F.linear(x, weight).sum())(xs[0]),
        "jacrev": lambda: torch.func.jacrev(lambda x: F.linear(x, weight))(xs[0]),
        "jvp": lambda: torch.func.jvp(lambda x: F.linear(x, weight), (xs[0],), (xs[0],)),
        "whole": lambda: torch.vmap(lambda x: x @ weight.full_tensor().t())(xs),
    }
    for name, use in uses.items():
        with pytest.raises(gtp.UnsupportedError, match=r"'1\.weight'.*inside a transform of torch\.func"):
            print(name, "gave", use())
    with pytest.raises(gtp.UnsupportedError, match=r"used inside a transform of torch\.func.*a batch dimension"):
        torch.vmap(lambda x: gtp.ops.linear(x, weight))(xs)
    # constants are constants: norms and, without grad mode, whole weights
    whole = twins.plain[1].weight.detach()
    got = torch.vmap(lambda x: x * torch.linalg.vector_norm(weight.data))(xs)
    torch.testing.assert_close(got, xs * torch.linalg.vector_norm(whole), rtol=1e-6, atol=0)
    with torch.no_grad():
        assert torch.equal(torch.vmap(lambda x: x @ weight.full_tensor().t())(xs), xs @ whole.t())
    twins.step(inputs(1, 3, 6))


def test_transforms_over_a_weight_outside_a_forward_are_refused(ranks):
    ranks(2).run(_transforms)


def _batched_gradients():
    """What `torch.autograd.functional.jacobian(vectorize=True)` does is right for inputs and refused for weights."""
    twins = SideBySide(_model, optimizer=None)
    x = inputs(0, 3, 6)[rank()]
    plain, sharded = [
        torch.autograd.functional.jacobian(m, x, vectorize=True) for m in (twins.plain, twins.sharded)
    ]  # one batched product in place of several
    torch.testing.assert_close(sharded, plain, **ROUNDED)
    y = twins.sharded(x)
    with pytest.raises(gtp.UnsupportedError, match=r"'1\.weight'.*is_grads_batched.*once per gradient"):
        torch.autograd.grad(y, twins.sharded[1].weight, torch.ones(2, *y.shape), is_grads_batched=True)
    twins.backward(inputs(1, 3, 6))


def test_batched_gradients_of_weights_are_refused(ranks):
    ranks(2).run(_batched_gradients)


# --- wrappers


def _wrapped(init_sync, alone):
    options = {"group": [subgroup((r,)) for r in range(2)][rank()]} if alone else {}

    def around_a_model_that_holds_it(model):
        return DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), model), init_sync=init_sync)

    def around_a_part(model):
        return DistributedDataParallel(model[1], init_sync=init_sync)

    def around_it(model):
        return DistributedDataParallel(model, init_sync=init_sync, find_unused_parameters=True)

    for wrap in (around_it, around_a_part, around_a_model_that_holds_it):
        twins = SideBySide(_model, **options)
        if init_sync:
            with pytest.raises(gtp.UnsupportedError, match=r"1\.weight.*take the wrapper away.*2-d mesh"):
                wrap(twins.sharded)
        elif wrap is not around_a_part:  # a part has no forward of the root
            wrapper = wrap(twins.sharded)
            for _ in range(2):
                with pytest.raises(gtp.UnsupportedError, match=r"1\.weight.*take the wrapper away.*2-d mesh"):
                    wrapper(torch.ones(2, 6))
        assert_same_parameters(twins.sharded, twins.plain)
        twins.step(inputs(0, 3, 6)[:1] if alone else inputs(0, 3, 6))


@pytest.mark.parametrize("alone", [False, True], ids=["all_ranks", "group_of_one"])
@pytest.mark.parametrize("init_sync", [True, False])
def test_ddp_around_a_sharded_model_is_refused_before_it_broadcasts(ranks, init_sync, alone):
    """C91: whether it is given the model, a part of it, or a module that holds it. A weight that is sharded over one
    rank has no gradient that DDP could see."""
    ranks(2).run(_wrapped, init_sync, alone)


def _wrapped_before():
    for wrap in (lambda wrapper: wrapper, lambda wrapper: nn.Sequential(nn.Linear(6, 6), wrapper)):
        with pytest.raises(gtp.GTPStateError, match=r"(the model|1): it is wrapped in Distributed.*wrapper\.module"):
            gtp.shard_model(wrap(DistributedDataParallel(_model())), dist.group.WORLD)
    model = _model()
    wrapper = DistributedDataParallel(model)
    gtp.shard_model(model, dist.group.WORLD)  # the wrapper is not seen from here
    with pytest.raises(gtp.UnsupportedError, match=r"1\.weight.*take the wrapper away"):
        wrapper(torch.ones(2, 6))


def test_sharding_inside_of_ddp_is_refused(ranks):
    """C91."""
    ranks(2).run(_wrapped_before)


def _replicated():
    twins = SideBySide(_model)
    wrapper = nn.Sequential(twins.sharded)
    with pytest.raises(gtp.UnsupportedError, match=r"1\.weight.*take the wrapper away"):
        replicate(wrapper)(torch.ones(2, 6))
    assert_same_parameters(twins.sharded, twins.plain)


def test_replicate_around_a_sharded_model_is_refused(ranks):
    ranks(2).run(_replicated)


def _beside_ddp():
    """Another model inside of DDP, whose forward uses the sharded one, is nobody's mistake."""

    class Student(nn.Module):
        def __init__(self, teacher):
            super().__init__()
            self.linear, self.teacher = nn.Linear(6, 6), [teacher]

        def forward(self, x):
            return self.linear(x) - self.teacher[0](x)

    twins = SideBySide(_model)
    student = DistributedDataParallel(Student(twins.sharded))
    x = inputs(0, 3, 6)[rank()]
    wanted = student.module.linear(x) - twins.plain(x)
    assert torch.equal(student(x), wanted)


def test_ddp_around_another_model_is_fine(ranks):
    ranks(2).run(_beside_ddp)


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _under_modes():
    twins = SideBySide(_model)
    before = twins.sharded[1].weight.full_tensor().detach()
    for mode in (_Mode, lambda: torch.device("cpu")):
        with mode(), mode():
            with pytest.raises(gtp.UnsupportedError, match=r"DistributedDataParallel.*take the wrapper away"):
                DistributedDataParallel(twins.sharded)
            with pytest.raises(gtp.UnsupportedError, match=r"was given to torch\.vmap"):
                torch.vmap(lambda row: row.sum())(twins.sharded[1].weight)
    assert torch.equal(twins.sharded[1].weight.full_tensor(), before)
    twins.step(inputs(0, 3, 6))


def test_modes_of_torch_functions_hide_nobody(ranks):
    """`torch.set_default_device` is one."""
    ranks(2).run(_under_modes)


# --- inputs


class _Plain(torch.Tensor):
    """torch's own rule: other classes are asked, too."""


class _Noting(torch.Tensor):
    """Somebody's rule, which asks other classes, too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def _foreign_inputs():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(6, 10, bias=False), nn.Embedding(10, 4)), optimizer=None)
    linear, embedding = twins.sharded
    rows, ids = [torch.ones(2, 6), torch.ones(3, 6)], [torch.tensor([1, 2]), torch.tensor([1])]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for name, call in {
        r"0\.weight.*NestedTensor": lambda: linear(nested),
        r"0\.weight.*a NestedTensor": lambda: linear(input=nested),
        r"1\.weight.*NestedTensor": lambda: embedding(torch.nested.nested_tensor(ids, layout=torch.jagged)),
        r"0\.weight.*MaskedTensor": lambda: linear(torch.masked.masked_tensor(rows[0], rows[0] > 0)),
    }.items():
        with pytest.raises(gtp.UnsupportedError, match=rf"{name}.*rows in place of the weight.*plain tensors"):
            call()
    wanted = twins.plain[0](rows[0])
    for x in (rows[0], nn.Parameter(rows[0]), rows[0].as_subclass(_Plain), rows[0].as_subclass(_Noting)):
        assert torch.equal(linear(x), wanted)
    assert torch.equal(linear(nested.values()), twins.plain[0](torch.cat(rows)))
    layer = Linear(6, 10, bias=False)  # asks the weight, whatever the input is
    plain = copy.deepcopy(layer)
    gtp.shard_model(layer, dist.group.WORLD)
    with torch.no_grad():
        for got, part in zip(layer(nested).unbind(), rows, strict=True):
            assert torch.equal(got, plain(part))
        assert torch.equal(layer(rows[0].to_sparse()), plain(rows[0].to_sparse()))
    ragged = torch.nested.nested_tensor(rows)
    for kind, x in (("nested", nested), ("nested", ragged), ("sparse_coo", rows[0].to_sparse())):
        with pytest.raises(gtp.UnsupportedError, match=rf"'weight'.*is a {kind} tensor.*\.values\(\)"):
            layer(x)


def test_inputs_that_would_compute_with_a_shard_are_refused(ranks):
    """C65: nested tensors are asked before the weight."""
    ranks(2).run(_foreign_inputs)


class Doubled(nn.Linear):
    def forward(self, input, scale=2):
        return super().forward(input) * scale


def _forwards():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(6, 6), Doubled(6, 6), nn.Embedding(10, 4)), optimizer=None)
    x = torch.ones(2, 6)
    for mine, plain in zip(twins.sharded, twins.plain, strict=True):
        assert type(mine) is type(plain)
        # Hooks make every call dearer, and make_graphed_callables takes no module that has one.
        hooks = [mine._forward_hooks, mine._forward_pre_hooks, mine._backward_hooks, mine._backward_pre_hooks]
        assert hooks == [{}] * 4
        assert inspect.signature(mine.forward) == inspect.signature(plain.forward)
    assert torch.equal(twins.sharded[1](x, scale=3), twins.plain[1](x, scale=3))
    # a forward of the instance's own stays; so does a hook's right to look at the input first
    layer = nn.Linear(6, 6)
    plain = copy.deepcopy(layer)
    layer.forward = lambda x: nn.Linear.forward(layer, -x)
    gtp.shard_model(layer, dist.group.WORLD)
    layer.register_forward_pre_hook(lambda _, args: tuple(a.values() if a.is_nested else a for a in args))
    assert torch.equal(layer(x), plain(-x))
    assert torch.equal(layer(torch.nested.nested_tensor([x, x], layout=torch.jagged)), plain(-torch.cat([x, x])))


def test_looking_at_inputs_leaves_forwards_as_they_are(ranks):
    """C65: no class, no hook of gtp on a layer; what a user's own forward or hook does is done."""
    ranks(2).run(_forwards)


# --- scripting


def _scripted():
    twins = SideBySide(_model)
    for module, name in ((twins.sharded, "Sequential"), (twins.sharded[1], "1"), (nn.Sequential(twins.sharded), "Seq")):
        with pytest.raises(gtp.UnsupportedError, match=rf"{name}.* is sharded.*torch\.compile"):
            torch.jit.script(module)
    assert torch.equal(torch.jit.script(twins.sharded[0])(torch.ones(1, 6)), twins.plain[0](torch.ones(1, 6)))
    twins.step(inputs(0, 3, 6))


def test_scripting_is_refused(ranks):
    ranks(2).run(_scripted)


def _traced():
    twins = SideBySide(_model)
    x = torch.ones(1, 6)
    for trace in (
        lambda: make_fx(twins.sharded)(x),
        lambda: make_fx(twins.sharded[1])(x),
        lambda: torch.export.export(twins.sharded, (x,), strict=False),
        lambda: _under(FakeTensorMode(allow_non_fake_inputs=True), lambda: twins.sharded(x)),
        lambda: torch.jit.trace(twins.sharded, (x,)),
    ):
        for grad in (torch.no_grad(), torch.enable_grad()):
            with grad, pytest.raises(gtp.UnsupportedError, match=r"sharded.*would record.*Trace the plain model"):
                trace()
    with torch.no_grad(), pytest.raises(gtp.UnsupportedError, match=r"1\.weight.*would record"):
        torch.jit.trace(lambda x: x + twins.sharded[1].weight.full_tensor().sum(), (x,))
    # what only looks on does so, and symbolic tracing takes layers as they are
    counter = FlopCounterMode(display=False)
    assert torch.equal(_under(counter, lambda: twins.sharded(x)), twins.plain(x))
    assert counter.get_total_flops() == 2 * (6 * 10 + 10 * 6)
    assert torch.equal(torch.fx.symbolic_trace(twins.sharded)(x), twins.plain(x))
    twins.step(inputs(0, 3, 6))


def _under(mode, call):
    with mode:
        return call()


@pytest.mark.parametrize("size", [1, 2])
def test_tracing_is_refused(ranks, size):
    """C65: a trace would hold this moment's weights, or none of the gathers."""
    ranks(size).run(_traced)


def _printed():
    twins = SideBySide(_model)
    weight = twins.sharded[1].weight
    assert f"{weight}" == repr(weight)
    assert f"{weight.data}".startswith("ShardRows('1.weight', rows")


def test_a_shard_can_be_printed_by_a_format_string(ranks):
    ranks(2).run(_printed)

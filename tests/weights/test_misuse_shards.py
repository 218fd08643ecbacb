"""A shard never passes for the weight: whatever was made of one computes as rows, or says what to use."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from gtp.testing.ranks import rank, subgroup
from gtp.weights.rows import ShardRows
from tests.reference import full, full_grad
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square


def _model():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def _with_gradient():
    twins = SideBySide(_model, optimizer=None)
    twins.backward(inputs(0, 3, 6))
    return twins, twins.sharded[0].weight


def _derived(weight):
    """Everything that a user can make of a weight and that holds its rows."""
    with torch.no_grad():
        return {
            "detach": weight.detach(),
            "data": weight.data,
            "arithmetic": weight * 2,
            "of arithmetic": (weight * 2 + 1).abs(),
            "of data": weight.data * 2,
            "clone": weight.detach().clone(),
            "cast": weight.detach().double().float(),
            "foreach": torch._foreach_mul([weight], 2.0)[0],
            "state": torch.zeros_like(weight).copy_(weight),
            "copy": copy.deepcopy(weight.detach()),
            "parameter": nn.Parameter(weight.detach().clone()),
            "grad": weight.grad,
            "grad arithmetic": weight.grad + weight,
            "broadcast": weight.detach() * torch.ones(6),
        }


NEEDS_FULL = r"'0\.weight'.*needs the full weight \(10, 6\).*full_tensor"


def _computing_with_rows():
    twins, weight = _with_gradient()
    x, ids = inputs(0, 3, 6)[rank()], torch.zeros(3, dtype=torch.long)
    uses = {
        "linear": lambda w: F.linear(x, w),
        "embedding": lambda w: F.embedding(ids, w),
        "matmul": lambda w: x @ w.t(),
        "rmatmul": lambda w: torch.ones(2, 5) @ w,
        "einsum": lambda w: torch.einsum("bi,oi->bo", x, w),
        "gtp linear": lambda w: gtp.ops.linear(x, w),
        "rows": lambda w: w[0],
        "one row written": lambda w: w.__setitem__(0, 0.0),
        "numpy": lambda w: w.numpy(),
        "list": lambda w: w.tolist(),
        "cat": lambda w: torch.cat([w, w]),
        "iteration": list,
        "transpose": lambda w: w.T,
    }
    for made, value in _derived(weight).items():
        assert isinstance(value, ShardRows), made
        for use, call in uses.items():
            with pytest.raises(gtp.UnsupportedError, match=NEEDS_FULL):
                print(use, "of", made, "gave", call(value))
        with pytest.raises(gtp.UnsupportedError, match=r"0\.weight: this is rows"):
            pickle.dumps(value)
    # what is asked for by name is given: the plain local tensor, and the whole
    local = weight.shard
    assert type(local) is torch.Tensor
    assert torch.equal(weight.data.shard, local)
    assert torch.equal(local, twins.plain[0].weight[weight.layout.shard_slice])
    assert torch.equal(weight.data.full_tensor(), twins.plain[0].weight)
    assert torch.equal(weight.grad.full_tensor(), twins.plain[0].weight.grad)
    assert torch.equal((weight.detach() * 2).full_tensor(), twins.plain[0].weight.detach() * 2)


def test_what_was_made_of_a_shard_does_not_pass_for_the_weight(ranks):
    ranks(2).run(_computing_with_rows)


def _reductions():
    twins, weight = _with_gradient()
    wanted = twins.plain[0].weight.grad
    other = torch.zeros(5, 6)
    wrong = [
        lambda g: g.sum(),
        lambda g: torch.sum(input=g),
        lambda g: torch.mean(g),
        lambda g: g.max(),
        lambda g: torch.topk(g.detach(), 1),
        lambda g: F.normalize(g),
        lambda g: torch.renorm(g, 2, 0, 1.0),
        lambda g: F.mse_loss(g, other),
        lambda g: F.mse_loss(input=other, target=g),
        lambda g: F.cosine_similarity(g, other),
        lambda g: torch.linalg.norm(g, 2),
        lambda g: torch.linalg.vector_norm(g, dim=0),
        lambda g: torch.linalg.vector_norm(x=g, dim=0),
        lambda g: torch.norm(g, dim=1),
        lambda g: g.norm(p="nuc"),
        lambda g: torch.linalg.matrix_norm(g),
        lambda g: torch.dist(g, other),
        lambda g: g.softmax(-1),
        lambda g: g.cumsum(0),
        lambda g: g.sort(),
        lambda g: torch.allclose(g, other),
        lambda g: torch.equal(g, other),
        lambda g: torch.isnan(g).any(),
        lambda g: g.std(),
        lambda g: torch.histc(g),
        lambda g: torch.stack([g]),
        lambda g: torch._foreach_max([g]),
        lambda g: torch.nn.utils.parameters_to_vector([g]),
        lambda g: bool(g),
        lambda g: g.item(),
    ]
    for number, use in enumerate(wrong):
        for value in (weight.grad, weight.grad.detach(), weight.grad * 1):
            with pytest.raises(gtp.UnsupportedError, match=r"'0\.weight'.*\.shard"):
                print("reduction", number, "gave", use(value))
    norms = [
        (torch.linalg.vector_norm, {}),
        (torch.linalg.norm, {}),
        (torch.norm, {}),
        (torch.Tensor.norm, {}),
        (torch.linalg.vector_norm, {"ord": 3}),
        (torch.norm, {"p": 1}),
    ]
    for norm, options in norms:
        for got, whole in ((weight.grad, wanted), (weight.data, twins.plain[0].weight.detach())):
            torch.testing.assert_close(norm(got, **options), norm(whole, **options), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.linalg.vector_norm(x=weight.grad, ord=1), wanted.abs().sum(), rtol=1e-6, atol=0)


def test_reductions_are_of_the_whole_or_raise(ranks):
    """Norms add rounding of one fp32 sum in another order, and nothing else answers for one rank's rows."""
    ranks(2).run(_reductions)


def _elementwise():
    """What optimizers, clipping and averages do, on weights, gradients and states, in place and not."""
    twins, weight = _with_gradient()
    plain = twins.plain[0].weight
    with torch.no_grad():
        for w in (weight, plain):
            average = w.detach().clone()
            average.lerp_(w.data, 0.5)
            average.mul_(0.9).add_(w.grad, alpha=0.1)
            w.grad.clamp_(-0.01, 0.01)
            torch._foreach_clamp_max_([w.grad], 0.005)
            update = torch.sign(w.grad) * average.abs().sqrt() / (w.grad.square() + 1e-3)
            update = torch.where(update > 0, update, -update).nan_to_num()
            w.data.sub_(update, alpha=0.1)
            w.data.addcdiv_(w.grad, average.abs() + 1, value=-0.1)
            w.detach().mul_(0.99)
            w.data = w.data * 1.01
            w.grad = w.grad * 2
            torch.nn.init.constant_(w.detach(), 0.5).add_(update)
            w.add_(update)
    assert torch.equal(full(weight), plain)
    assert torch.equal(full_grad(weight), plain.grad)
    assert repr(weight.detach()).startswith("ShardRows('0.weight', rows")


def test_arithmetic_stays_arithmetic(ranks):
    ranks(2).run(_elementwise)


def _zeroed_the_old_way():
    """Gradients as autograd left them, replaced, held by no_sync, and after that."""
    twins = SideBySide(_model)
    for step, made in enumerate(("left", "replaced", "held", "after")):
        if made == "held":
            with twins.runtime.no_sync():
                twins.backward(inputs(step, 3, 6), check=False)
        else:
            twins.backward(inputs(step, 3, 6))
        for parameter in (*twins.plain.parameters(), *twins.sharded.parameters()):
            if made == "replaced":
                parameter.grad = parameter.grad * 2
            parameter.grad.detach_()
            parameter.grad.zero_()
            parameter.data.detach_()
            assert not parameter.grad.requires_grad
        twins.backward(inputs(step + 10, 3, 6))
        twins.update()


def test_gradients_are_detached_and_zeroed_in_place(ranks):
    ranks(2).run(_zeroed_the_old_way)


OPTIMIZERS = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.01, amsgrad=True, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.01, maximize=True, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.01, **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **o),
    "Adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
    "Adamax": lambda p, **o: torch.optim.Adamax(p, lr=0.01, **o),
    "NAdam": lambda p, **o: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1, **o),
    "RAdam": lambda p, **o: torch.optim.RAdam(p, lr=0.01, **o),
    "Rprop": lambda p, **o: torch.optim.Rprop(p, **o),
    "ASGD": lambda p, **o: torch.optim.ASGD(p, **o),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def _optimizers():
    for name, build in OPTIMIZERS.items():
        for options in [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]:

            def made(parameters, build=build, options=options):
                return build(parameters, **options)

            # fused kernels vectorize: the tail of a tensor rounds differently from its body
            twins = SideBySide(_model, optimizer=made, **ROUNDED)
            for step in range(3):
                twins.backward(inputs(step, 3, 6), check=False)
                for model in (twins.plain, twins.sharded):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
                twins.update()
            state = twins.optimizers[1].state_dict()
            twins.optimizers[1].load_state_dict(copy.deepcopy(state))
            twins.step(inputs(9, 3, 6))


def test_every_elementwise_optimizer_of_torch_trains_as_on_the_plain_model(ranks):
    ranks(2).run(_optimizers, timeout=300)


def _optimizer_made_before():
    for build in (
        lambda p: torch.optim.AdamW(p, weight_decay=0, foreach=False),
        lambda p: torch.optim.AdamW(p, weight_decay=0, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, momentum=0.9, lr=0.1, foreach=True),
    ):
        for rows in (2, 10):
            model = nn.Linear(6, rows, bias=False)
            optimizer = build(model.parameters())
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gtp.shard_model(model, dist.group.WORLD)
            before = model.weight.full_tensor()
            model(torch.ones(2, 6)).sum().backward()
            with pytest.raises(gtp.GTPValueError, match=r"logical shape: make the optimizer .* after gtp.shard_model"):
                optimizer.step()
            assert torch.equal(model.weight.full_tensor(), before)


def test_an_optimizer_with_state_of_before_is_refused_on_every_path(ranks):
    ranks(2).run(_optimizer_made_before)


def _advice():
    twins, weight = _with_gradient()
    for optimizer in (torch.optim.LBFGS([weight]), torch.optim.Adafactor([weight])):
        before = weight.full_tensor()
        with pytest.raises(gtp.UnsupportedError, match=r"cannot work on shards.*gtp\.optim\.Muon"):
            optimizer.step(lambda: torch.tensor(1.0))
        assert torch.equal(weight.full_tensor(), before)
    for init in (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.trunc_normal_,
        nn.init.orthogonal_,
    ):
        for value in (weight, weight.data):
            with pytest.raises(
                gtp.UnsupportedError, match=r"before gtp\.shard_model.*full_weights\(model, write=True\)"
            ):
                init(value)
    with pytest.raises(gtp.UnsupportedError, match=r"eye needs the full weight.*full_tensor"):
        nn.init.eye_(weight)
    nn.init.constant_(weight, 0.25)
    assert torch.equal(weight.full_tensor(), torch.full((10, 6), 0.25))
    nn.init.zeros_(weight)
    assert torch.equal(weight.full_tensor(), torch.zeros(10, 6))
    square(twins.sharded, inputs(1, 3, 6)[rank()]).backward()


def test_errors_of_optimizers_and_initializers_say_what_to_use(ranks):
    ranks(2).run(_advice)


def _one_rank():
    """A group of one holds the weight itself: everything is allowed, and equal to plain torch."""
    model = nn.Sequential(nn.Linear(6, 10))
    gtp.shard_model(model, [subgroup((r,)) for r in range(2)][rank()])
    model(torch.ones(2, 6)).sum().backward()
    weight = model[0].weight
    assert F.linear(torch.ones(1, 6), weight.detach()).shape == (1, 10)
    assert float(weight.grad.sum()) == 2.0 * 10 * 6
    assert weight.data[3:5].shape == (2, 6)


def test_a_group_of_one_is_the_plain_weight(ranks):
    ranks(2).run(_one_rank)


def _data_of_another_shape():
    """What the rows say of themselves stays true: lists of them are trusted by it."""
    _, weight = _with_gradient()
    for rows in (weight.grad, weight.detach(), weight.detach() * 2):
        with pytest.raises(gtp.GTPValueError, match=r"have the shape \(5, 6\), got \.data of shape \(10, 6\)"):
            rows.data = torch.zeros(10, 6)
        rows.data = torch.ones(5, 6)
        assert torch.equal(rows.shard, torch.ones(5, 6))


def test_rows_take_no_data_of_another_shape(ranks):
    ranks(2).run(_data_of_another_shape)

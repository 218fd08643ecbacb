"""`shard_model(unshard=...)`: modules that use their weights by any functions get them whole during their forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.testing.ranks import rank
from tests.compiling import fresh_compiler
from tests.reference import data_parallel_backward
from tests.weights.side_by_side import ROUNDED, SideBySide, inputs, square
from tests.weights.unshard_kinds import KINDS, Attention, Conv1D, Experts, Lists, Sparse, model_of


def _trained(options, kinds=KINDS):
    size = dist.get_world_size()
    bound = {} if size == 2 else ROUNDED
    twins = SideBySide(
        lambda: model_of(kinds), optimizer=lambda p: torch.optim.SGD(p, lr=0.05), unshard="*", **bound, **options
    )
    unsharded = [n for n, p in twins.sharded.named_parameters() if not isinstance(p, gtp.GTPWeight)]
    assert unsharded == []
    for step in range(3):
        twins.step(inputs(step, 10, 8))
    with torch.no_grad():
        x = inputs(9, 10, 8)[rank()]
        if size == 2:
            assert torch.equal(twins.sharded(x), twins.plain(x))
    for module in twins.sharded.modules():
        assert not set(module._parameters) & set(vars(module))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_modules_of_any_kind_train_sharded_as_data_parallel(ranks, size):
    ranks(size).run(_trained, {})


def test_sparse_and_nested_tensors_are_saved_as_they_are(ranks):
    ranks(2).run(_trained, {}, [Sparse])


@pytest.mark.parametrize("options", [{"keep_bytes": 1 << 20}, {"prefetch_bytes": 0}, {"debug": True}])
def test_settings_change_no_number(ranks, options):
    ranks(2).run(_trained, {"config": gtp.GTPConfig(**options)}, [Experts, Conv1D, Lists, Attention])


def _recomputed(reentrant):
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Experts(), Conv1D())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def build():
        return nn.Sequential(nn.Linear(8, 8), Recomputed(), Recomputed())

    twins = SideBySide(build, unshard="*")
    for step in range(3):
        twins.step(inputs(step, 10, 8))
    assert any(phase == "recompute" for _, phase in twins.runtime.trace())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_modules_get_the_same_numbers(ranks, reentrant):
    ranks(2).run(_recomputed, reentrant)


def _offloaded():
    """Hooks around the model see what it saves, and no weight."""
    twins = SideBySide(lambda: model_of([Experts, Conv1D]), unshard="*", optimizer=None)
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        loss = square(twins.sharded, inputs(0, 10, 8)[rank()])
    loss.backward()
    every = inputs(0, 10, 8)
    data_parallel_backward(twins.plain, every, square)
    twins.check_gradients()
    assert (10, 8) in shapes
    assert not {(5, 6, 8), (6, 8), (5, 8, 6), (8, 6)} & set(shapes)


def test_hooks_of_others_get_what_is_no_weight(ranks):
    ranks(2).run(_offloaded)


def _frozen(which):
    def build():
        model = nn.Sequential(nn.Linear(8, 8), Experts(), Conv1D())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(which))
        return model

    twins = SideBySide(build, unshard="*")
    for step in range(3):
        twins.step(inputs(step, 10, 8))


@pytest.mark.parametrize("which", ["1.", "1.up", "0."])
def test_frozen_weights_let_the_gradient_through(ranks, which):
    ranks(2).run(_frozen, which)


def _shared():
    """One module used twice, one tensor in two modules, one of which is served by F.linear."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = Conv1D(), nn.Linear(8, 8)
            self.linear.weight = self.conv.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.conv(torch.tanh(self.conv(x))))

    twins = SideBySide(Twice, unshard="conv.weight", **ROUNDED)
    assert twins.sharded.linear.weight is twins.sharded.conv.weight
    for step in range(3):
        twins.step(inputs(step, 10, 8))


def test_tied_weights_and_repeated_modules_get_every_gradient(ranks):
    ranks(2).run(_shared)


class Recursive(nn.Module):
    """Calls itself: the inner forward's end must not take the weight from the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y = self(x, depth - 1) if depth else x
        return torch.tanh(y @ self.weight)


def _recursive():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Recursive()), unshard="*", **ROUNDED)
    for step in range(3):
        twins.step(inputs(step, 10, 8))


def test_a_module_that_calls_itself(ranks):
    ranks(2).run(_recursive)


def _returned():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Experts()), unshard="*", optimizer=None)
    every = inputs(0, 10, 8)
    data_parallel_backward(twins.plain, every, square)
    weights = [twins.sharded[1].up, twins.sharded[1].down]
    grads = torch.autograd.grad(square(twins.sharded, every[rank()]), weights)
    for weight, grad, plain in zip(weights, grads, [twins.plain[1].up, twins.plain[1].down], strict=True):
        assert weight.grad is None
        assert torch.equal(grad[weight.layout.valid_slice], plain.grad[weight.layout.shard_slice])


def test_autograd_grad_returns_reduced_gradients(ranks):
    ranks(2).run(_returned)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Table(nn.Module):
    """Gives its weight away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self) -> dict[str, Pair]:
        return {"pair": Pair(self.weight[:5].T, self.weight)}


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = Table(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.table()["pair"]
        rows = pair.second[torch.arange(x.shape[0]) % 8]
        rows += x @ pair.first @ pair.first.T
        return self.linear(rows.relu_()) @ pair.second


def _given_away():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Reads()), unshard="*", **ROUNDED)
    for step in range(3):
        twins.step(inputs(step, 10, 8))
    with torch.no_grad():
        x = inputs(9, 10, 8)[rank()]
        assert torch.equal(twins.sharded(x), twins.sharded(x))


def test_weights_that_a_forward_returns_may_be_used_after_it(ranks):
    ranks(2).run(_given_away)


def _given_forwards():
    """Modules that were given a forward of their own before they were sharded; one of a class that is known."""
    model = nn.Sequential(nn.Linear(8, 8), Conv1D(), nn.Linear(8, 8))
    linear, doubled = model[2], model[1].forward
    model[1].forward = lambda x: 2 * doubled(x)
    model[2].forward = lambda x: x @ linear.weight.T + linear.bias
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank()))
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    hidden = F.linear(x, full["0.weight"], full["0.bias"])
    hidden = 2 * torch.addmm(full["1.bias"], hidden, full["1.weight"])
    assert torch.equal(model(x), hidden @ full["2.weight"].T + full["2.bias"])


def test_forwards_that_users_gave_to_modules_are_run_with_full_weights(ranks):
    ranks(2).run(_given_forwards)


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.token = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        return x if getattr(self, "token", None) is None else x + self.token


def _taken_away(how, unshard):
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Token()), unshard=unshard, optimizer=None)
    twins.backward(inputs(0, 10, 8))
    for model in (twins.plain, twins.sharded):
        model.zero_grad()
        if how == "deleted":
            del model[1].token
        else:
            model[1].token = None
    twins.backward(inputs(1, 10, 8))
    assert "token" not in vars(twins.sharded[1])


@pytest.mark.parametrize("unshard", ["*", "1.token"], ids=["one of two", "the only one"])
@pytest.mark.parametrize("how", ["deleted", "none"])
def test_parameters_may_be_taken_away_later(ranks, how, unshard):
    ranks(2).run(_taken_away, how, unshard)


class Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, ones = self.weight, torch.ones_like(x)
        x = torch.vmap(lambda row: torch.tanh(row @ weight))(x)
        x = torch.func.jvp(lambda y: torch.tanh(y @ weight), (x,), (ones,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(torch.tanh(forward_ad.make_dual(x, ones) @ weight)).tangent


def _transformed():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Transformed()), unshard="*", **ROUNDED)
    for step in range(2):
        twins.step(inputs(step, 10, 8))


def test_forward_mode_and_vmap_inside_of_a_forward(ranks):
    ranks(2).run(_transformed)


def _inferred():
    model = model_of([Conv1D, Experts])
    gtp.shard_model(model, dist.group.WORLD, unshard="*", config=gtp.GTPConfig(param_dtype=torch.bfloat16))
    x = torch.randn(10, 8).bfloat16()
    with torch.inference_mode():
        inferred = model(x)
    y = model(x)
    assert torch.equal(y, inferred)
    y.sum().backward()


@pytest.mark.parametrize("size", [1, 2])
def test_inference_mode_in_another_dtype(ranks, size):
    ranks(size).run(_inferred)


def _compiled():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8)), unshard="*")
    with fresh_compiler():
        called = torch.compile(twins.sharded, backend="aot_eager")
        for step in range(3):
            twins.step(inputs(step, 10, 8), lambda model, x: square(called if model is twins.sharded else model, x))


def test_compiled_models_run_the_module_outside_of_graphs(ranks):
    ranks(2).run(_compiled, timeout=120.0)


def _trained_on_gpu(transport, lag):
    from tests.weights.test_gpu_training import device_and_group

    device, group = device_and_group()
    twins = SideBySide(
        lambda: model_of().to(device),
        group=group,
        config=gtp.GTPConfig(transport=transport),
        unshard="*",
        rtol=1e-4,
        atol=1e-5,  # cuBLAS and cuDNN choose by where memory lies
    )
    for step in range(8):
        if lag:
            torch.cuda._sleep(int(2e7) * ((rank() + step) % 2))
        twins.step([x.to(device) for x in inputs(step, 10, 8)])
    torch.cuda.synchronize()
    assert twins.runtime.stats().transport == transport


@pytest.mark.gpu
@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("transport", ["process_group", "copy_engine"])
def test_modules_of_any_kind_train_on_gpus(ranks, transport, lag):
    ranks(2).run(_trained_on_gpu, transport, lag)

"""`shard_model(unshard=...)`: modules that use their weights by any functions get them whole during their forward."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide, adamw, inputs, live_count, settled, square


class Experts(nn.Module):
    """As Hugging Face keeps them: all experts in one tensor, indexed."""

    def __init__(self, count: int = 5, width: int = 8, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, hidden, width) * 0.3)
        self.down = nn.Parameter(torch.randn(count, width, hidden) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            mine = x[expert :: self.up.shape[0]]
            out[expert :: self.up.shape[0]] += F.linear(F.silu(F.linear(mine, self.up[expert])), self.down[expert])
        return out


class Conv1D(nn.Module):
    """As in GPT-2: the weight is transposed, and addmm takes it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) * 0.3), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(x.shape)


class Transposed(nn.Linear):
    """As in Falcon; a Linear whose weight goes into no F.linear."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class Sparse(nn.Module):
    """Saves a sparse tensor for backward, and a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x @ self.weight)
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, x.shape[0]]))
        return torch.tanh(nested).values() + x


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(8) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(3, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = x * row
        return x + self.named["a"].sum(0)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.t()[None])[0].t().contiguous()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[None], x[None], x[None])[0][0]


KINDS = [Experts, Conv1D, Transposed, Sparse, Lists, Convolution, Attention]


def _model(kinds=KINDS) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *[kind() for kind in kinds], nn.Linear(8, 8))


def _trained(options):
    size = dist.get_world_size()
    bound = {} if size == 2 else {"rtol": 1e-5, "atol": 1e-6}
    twins = SideBySide(_model, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), unshard="*", **bound, **options)
    unsharded = [n for n, p in twins.sharded.named_parameters() if not isinstance(p, gtp.GTPWeight)]
    assert unsharded == []
    for step in range(4):
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


@pytest.mark.parametrize("options", [{"keep_bytes": 1 << 20}, {"prefetch_bytes": 0}, {"debug": True}])
def test_settings_change_no_number(ranks, options):
    ranks(2).run(_trained, {"config": gtp.GTPConfig(**options)})


def _leased(runtime):
    pool = runtime._pools.gathers
    pool.trim()
    return pool.leased_bytes


def _peak():
    """Of six weights, two are whole at a time, in forward and in backward; none is between them."""
    width = 64
    model = nn.Sequential(*[Experts(4, width, width) for _ in range(3)])
    runtime = gtp.shard_model(model, dist.group.WORLD, unshard="*", config=gtp.GTPConfig(prefetch_bytes=0))
    loss = model(torch.randn(8, width)).sum()
    between = settled(lambda: _leased(runtime), lambda nbytes: nbytes == 0)
    loss.backward()
    return between, runtime.stats().peak_leased_bytes / (4 * width * width * 4)


def test_full_weights_are_let_go_between_forward_and_backward(ranks):
    assert ranks(2).run(_peak) == [(0, 2.0)] * 2


def _consumes():
    twins = SideBySide(lambda: nn.Sequential(Experts(), Experts()), optimizer=adamw, unshard="*")
    for step in range(3):
        twins.step(inputs(step, 10, 8))
    return twins.runtime.trace(), twins.runtime.stats().hit_rate


def test_each_weight_is_gathered_once_per_forward_and_once_per_backward_ahead_of_its_use(ranks):
    trace, hits = ranks(2).run(_consumes)[0]
    forward = [name for name, phase in trace if phase == "forward"]
    backward = [name for name, phase in trace if phase == "backward"]
    assert forward == ["0.up", "0.down", "1.up", "1.down"]
    assert backward == ["1.down", "1.up", "0.down"]  # the model's input needs no gradient, so nothing reads 0.up
    assert hits > 0.5


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
    twins = SideBySide(lambda: _model([Experts, Conv1D]), unshard="*", optimizer=None)
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        loss = square(twins.sharded, inputs(0, 10, 8)[rank()])
    loss.backward()
    every = inputs(0, 10, 8)
    from tests.reference import data_parallel_backward

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

    twins = SideBySide(Twice, unshard="conv.weight", rtol=1e-5, atol=1e-6)
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
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Recursive()), unshard="*", rtol=1e-5, atol=1e-6)
    for step in range(3):
        twins.step(inputs(step, 10, 8))


def test_a_module_that_calls_itself(ranks):
    ranks(2).run(_recursive)


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


def _returned():
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Experts()), unshard="*", optimizer=None)
    from tests.reference import data_parallel_backward

    every = inputs(0, 10, 8)
    data_parallel_backward(twins.plain, every, square)
    weights = [twins.sharded[1].up, twins.sharded[1].down]
    grads = torch.autograd.grad(square(twins.sharded, every[rank()]), weights)
    for weight, grad, plain in zip(weights, grads, [twins.plain[1].up, twins.plain[1].down], strict=True):
        assert weight.grad is None
        assert torch.equal(grad[weight.layout.valid_slice], plain.grad[weight.layout.shard_slice])


def test_autograd_grad_returns_reduced_gradients(ranks):
    ranks(2).run(_returned)


def _leaks():
    model = nn.Sequential(nn.Linear(8, 8), Experts(), Fails())
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    gc.collect()
    gc.disable()
    try:
        y = model(torch.randn(4, 8))
        seen = weakref.ref(y)
        y.sum().backward()
        del y
        assert seen() is None
        alive = weakref.ref(model[2])
        del model
        return alive() is None, live_count(5 * 6 * 8 * 4, 0)
    finally:
        gc.enable()


def test_models_and_outputs_go_without_a_collection(ranks):
    assert ranks(2).run(_leaks) == [(True, 0)] * 2


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


def _compiled():
    torch._dynamo.reset()
    twins = SideBySide(lambda: nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8)), unshard="*")
    called = torch.compile(twins.sharded, backend="aot_eager")
    for step in range(3):
        twins.step(inputs(step, 10, 8), lambda model, x: square(called if model is twins.sharded else model, x))
    torch._dynamo.reset()


def test_compiled_models_run_the_module_outside_of_graphs(ranks):
    ranks(2).run(_compiled, timeout=120.0)


def _trained_on_gpu(transport, lag):
    from tests.weights.test_gpu_training import device_and_group

    device, group = device_and_group()
    twins = SideBySide(
        lambda: _model([kind for kind in KINDS if kind is not Sparse]).to(device),
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

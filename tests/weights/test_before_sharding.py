"""What a model brings along into `shard_model`: memory that is shared, hooks, classes, graphs. Kept, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.ranks import rank
from tests.weights.side_by_side import inputs
from tests.weights.unshard_kinds import Conv1D


def _refused(model, error, text, **options):
    kinds = [type(p) for p in model.parameters()]
    with pytest.raises(error, match=text):
        gtp.shard_model(model, dist.group.WORLD, **options)
    assert [type(p) for p in model.parameters()] == kinds


def plain(grad):
    return grad.detach().as_subclass(torch.Tensor).clone()


def _tied_by_memory():
    def pair():
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    text = r"[01]\.(weight|seen) and [01]\.(weight|seen) are two tensors over the same memory.*one object.*exclude="
    by_data, by_view, by_buffer, by_part = pair(), pair(), pair(), pair()
    by_data[1].weight.data = by_data[0].weight.data
    by_view[1].weight = nn.Parameter(by_view[0].weight.t())
    by_buffer[1].register_buffer("seen", by_buffer[0].weight.detach())
    by_part[1].weight = nn.Parameter(by_part[0].weight[2:])
    for model in (by_data, by_view, by_buffer, by_part):
        _refused(model, gtp.GTPValueError, text)
    _refused(by_data, gtp.GTPValueError, text, exclude="1.weight")  # a tie of one half is none


def test_parameters_that_are_tied_through_their_memory_alone_are_refused(ranks):
    """C11: `head.weight.data = table.weight.data` ties in plain torch, and shards would come apart without a word."""
    ranks(2).run(_tied_by_memory)


def _kept_elsewhere():
    for keep in (
        lambda layer: setattr(layer, "top", layer.weight[:4]),
        lambda layer: setattr(layer, "parts", [layer.weight.detach()[4:]]),
        lambda layer: setattr(layer, "parts", {"transposed": layer.weight.data.t()}),
    ):
        model = nn.Sequential(nn.Linear(8, 8), Conv1D())
        keep(model[1])
        _refused(model, gtp.GTPValueError, r"1\.(weight|top|parts\[.*\]) and .*over the same memory", unshard="*")
    model[1].parts = [model[1].weight, model[1].bias, model[1].weight.detach().clone()]  # the objects, and a copy
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    assert model[1].parts[0] is model[1].weight
    on_meta = nn.Sequential(nn.Linear(8, 8, device="meta"))
    on_meta[0].parts = [on_meta[0].weight]
    _refused(on_meta, gtp.GTPStateError, r"0\.parts\[0\] is a parameter on the meta device.*real device")


def test_views_of_weights_that_a_module_keeps_are_refused(ranks):
    """They went on showing the weight as it was at sharding; gradients of them went nowhere."""
    ranks(2).run(_kept_elsewhere)


def _gradients():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[0].requires_grad_(False)
    model(torch.full((4, 8), float(rank()))).sum().backward()
    _refused(model, gtp.GTPStateError, r"1\.weight: it holds a gradient.*zero_grad")


def test_gradients_of_before_are_refused_on_replicated_parameters_too(ranks):
    """They were each rank's own, and ranks came apart at the next step."""
    ranks(2).run(_gradients)


def _side_by_side_in_one_buffer():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    flat, columns = torch.randn(8 * 8 + 8), torch.randn(4, 16)
    model[0].weight.data, model[0].bias.data = flat[:64].view(8, 8), flat[64:]
    model[2].weight.data = columns[:, :8]
    model[2].register_buffer("other", columns[:, 8:])
    want = [p.detach().clone() for p in model.parameters()]
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    for parameter, expected in zip(model.parameters(), want, strict=True):
        dist.broadcast(expected, 0)
        assert torch.equal(parameter.full_tensor(), expected)


def test_parameters_that_lie_beside_each_other_in_one_buffer_are_sharded(ranks):
    ranks(2).run(_side_by_side_in_one_buffer)


def _hooks():
    hooked = nn.Sequential(nn.Linear(8, 8), Conv1D())
    hooked[1].weight.register_hook(lambda grad: grad * 0)
    text = r"1\.weight: it has a hook of register_hook.*never be called.*register_post_accumulate_grad_hook"
    _refused(hooked, gtp.UnsupportedError, text, unshard="*")

    model, seen = nn.Sequential(nn.Linear(8, 8), Conv1D()), {}
    handles = {
        name: parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: plain(p.grad)}))
        for name, parameter in model.named_parameters()
    }
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    model(inputs(0, 4, 8)[rank()]).sum().backward()
    assert set(seen) == set(handles)
    for name, parameter in model.named_parameters():
        assert torch.equal(seen[name], plain(parameter.grad))
    seen.clear()
    handles["1.weight"].remove()
    model(inputs(1, 4, 8)[rank()]).sum().backward()
    assert set(seen) == {"0.weight", "0.bias", "1.bias"}


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_that_were_registered_before_run_as_later_ones_do_or_are_refused(ranks, size):
    """They saw no gradient, or None in place of it."""
    ranks(size).run(_hooks)


def _on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[0].weight.decay, model[1].bias.decay = 0.1, 0.0
    seen = []
    model[1].weight.register_hook(lambda grad: 2 * grad)
    model[1].weight.register_hook(lambda grad: 10 * grad).remove()
    model[1].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    gtp.shard_model(model, dist.group.WORLD)
    model(torch.arange(8.0)).sum().backward()
    model[1].weight.grad, once = None, model[1].weight.grad
    x = model[0](torch.arange(8.0)).detach()
    plain = nn.LayerNorm(8)
    plain(x).sum().backward()
    assert torch.equal(once, 2 * plain.weight.grad)
    assert len(seen) == 2
    assert [1.0] * 8 in seen
    assert (8 // dist.get_world_size(), 8) in seen
    return type(model[0].weight).__name__, model[0].weight.decay, model[1].bias.decay


def test_attributes_and_hooks_of_meta_parameters_go_on(ranks):
    """Both were lost with the object."""
    assert ranks(2).run(_on_meta) == [("GTPWeight", 0.1, 0.0)] * 2


class _Own(nn.Parameter):
    """Somebody's parameter."""


class _Wrapped(torch.Tensor):
    """As quantized tensors are: values elsewhere, rules of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return _Wrapped(args[0].inner)
        raise AssertionError(f"{func} was called")


def _classes():
    for parameter, text in (
        (_Own(torch.randn(8, 8)), r"0\.weight is a _Own.*plain nn\.Parameter.*exclude="),
        (nn.Parameter(_Wrapped(torch.randn(8, 8))), r"0\.weight is a _Wrapped.*by itself.*plain"),
    ):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].weight = parameter
        _refused(model, gtp.GTPValueError, text)
    model[0].weight = _Own(torch.randn(8, 8))
    gtp.shard_model(model, dist.group.WORLD, exclude="0.*")
    assert type(model[0].weight) is _Own
    buffered = nn.Linear(8, 8)
    buffered.register_buffer("scales", _Wrapped(torch.randn(8)))
    _refused(buffered, gtp.GTPValueError, r"scales is a _Wrapped.*by itself")


def test_parameters_of_other_classes_are_refused_by_name_before_anything_changes(ranks):
    ranks(2).run(_classes)


def _graphs():
    """A forward ran before; its graph is alive, or is even differentiated."""
    model = nn.Sequential(nn.Linear(8, 8), Conv1D())
    early, first = model(torch.randn(4, 8)).sum(), model[0](torch.randn(4, 8)).sum()
    gtp.shard_model(model, dist.group.WORLD, unshard="*")
    with pytest.raises(gtp.GTPStateError, match=r"forward that ran before gtp\.shard_model.*forward again"):
        first.backward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        early.backward()
    assert all(p.grad is None for p in model.parameters())
    parameters = list(model.parameters())
    grads = torch.autograd.grad(model(inputs(0, 4, 8)[rank()]).sum(), parameters)
    model(inputs(0, 4, 8)[rank()]).sum().backward()
    for parameter, grad in zip(parameters, grads, strict=True):
        assert torch.equal(plain(grad), plain(parameter.grad))
    assert early.requires_grad


@pytest.mark.parametrize("size", [1, 2])
def test_a_graph_of_a_forward_before_is_not_differentiated_and_in_nobodys_way(ranks, size):
    ranks(size).run(_graphs)


def _inferred():
    model = nn.Sequential(nn.Linear(8, 8), Conv1D())
    with torch.inference_mode():
        gtp.shard_model(model, dist.group.WORLD, unshard="*")
        inferred = model(torch.ones(4, 8))
        assert torch.equal(gtp.full_state_dict(model)["1.weight"], model[1].weight.full_tensor())
    y = model(torch.ones(4, 8))
    assert torch.equal(y, inferred)
    y.sum().backward()
    assert model[1].weight.grad is not None
    with torch.inference_mode():
        built = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _refused(built, gtp.GTPValueError, r"0\.weight: it was made under torch\.inference_mode")


def test_sharding_inside_of_inference_mode_and_of_what_was_built_there(ranks):
    ranks(2).run(_inferred)

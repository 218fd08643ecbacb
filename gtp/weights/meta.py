"""Models on the meta device: shards are initialized one weight at a time, so the full model is never in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.weights.axes import broadcast_first
from gtp.weights.cut import take_shard
from gtp.weights.layout import ShardLayout
from gtp.weights.selection import Choice

Init = Callable[[str, torch.Tensor], None]


def materialize_meta(
    model: nn.Module,
    choices: Sequence[Choice],
    layouts: Mapping[str, ShardLayout],
    device: torch.device,
    init: Init | None,
) -> dict[str, torch.Tensor]:
    """Gives parameters and buffers on the meta device their values.

    With `init`, each tensor is filled by `init(name, tensor)`. Without, each module's `reset_parameters` draws its own
    parameters, module by module in order of registration, as building the model would have; a shard is cut and the full
    tensor let go before the next module. The random state moves alike at every group size, so the same seed gives the
    same full weights.

    Returns:
        Shards by name, for the sharded choices that were on the meta device. Replicated ones are in place already.

    Raises:
        GTPValueError: a module has nothing that could initialize it.
    """
    shards: dict[str, torch.Tensor] = {}
    on_meta = [c for c in choices if c.parameter.is_meta]
    done: set[int] = set()
    for prefix, module in model.named_modules():
        mine = [c for c in on_meta if c.owner is module and id(c.parameter) not in done]
        buffers = [name for name, b in module._buffers.items() if b is not None and b.is_meta]
        if not mine and not buffers:
            continue
        done.update(id(c.parameter) for c in mine)
        _fill(prefix, module, mine, buffers, device, init)
        for choice in mine:
            full = module._parameters[choice.attribute]
            assert full is not None
            broadcast_first(full.detach(), choice.axes)
            if choice.sharded:
                shards[choice.name] = shard = take_shard(full, layouts[choice.name])
                full = nn.Parameter(shard, requires_grad=choice.parameter.requires_grad)
            _replace_everywhere(model, choice, full)
    return shards


def _fill(
    prefix: str, module: nn.Module, mine: list[Choice], buffers: list[str], device: torch.device, init: Init | None
) -> None:
    for choice in mine:
        parameter = choice.parameter
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[choice.attribute] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name in buffers:
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    with torch.no_grad():
        if init is not None:
            for choice in mine:
                parameter_ = module._parameters[choice.attribute]
                assert parameter_ is not None
                init(choice.name, parameter_.data)
            for name in buffers:
                buffer = module._buffers[name]
                assert buffer is not None
                init(f"{prefix}.{name}" if prefix else name, buffer)
            return
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            what = ", ".join([c.name for c in mine] + [f"buffer {prefix}.{name}" for name in buffers])
            raise GTPValueError(
                f"{what}: on the meta device, and {type(module).__name__} has no reset_parameters to initialize it. "
                "Pass init=, a function of (name, tensor) that fills each tensor in place, or build this module on a "
                "real device"
            )
        reset()


def _replace_everywhere(model: nn.Module, choice: Choice, parameter: nn.Parameter) -> None:
    """A meta parameter cannot be re-pointed to a real device: put the new object in all of its places."""
    old = choice.parameter
    vars(parameter).update(vars(old))  # what users wrote on it
    # and registered: the same dicts, from which their handles remove
    parameter._backward_hooks = old._backward_hooks
    parameter._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    for module in model.modules():
        for attribute, held in module._parameters.items():
            if held is old:
                module._parameters[attribute] = parameter
    choice.owner._parameters[choice.attribute] = parameter
    choice.parameter = parameter

"""What a model holds, each object once: parameters, buffers, and tensors that torch knows nothing of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gtp.errors import GTPStateError


@dataclasses.dataclass
class Site:
    """A parameter object with all the places that hold it, in order of registration."""

    parameter: nn.Parameter
    names: list[str]
    places: list[tuple[nn.Module, str]]


def sites_of(model: nn.Module) -> list[Site]:
    """Each parameter object once, in order of registration."""
    found: dict[int, Site] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                site = found.setdefault(id(parameter), Site(parameter, [], []))
                site.names.append(f"{prefix}.{attribute}" if prefix else attribute)
                site.places.append((module, attribute))
    return list(found.values())


def buffers_of(model: nn.Module) -> list[tuple[list[str], nn.Module, str]]:
    """Each dense buffer object once, with all its names and its first place."""
    found: dict[int, tuple[list[str], nn.Module, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and buffer.numel():
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(buffer), ([], module, attribute))[0].append(name)
    return list(found.values())


def unregistered_in(model: nn.Module, known: set[int]) -> dict[str, nn.Parameter]:
    """Parameters that modules keep in lists and the like, where torch does not see them, by name; without `known`."""
    found: dict[str, nn.Parameter] = {}
    for name, item in _in_attributes(model):
        if isinstance(item, nn.Module):
            inside = {f"{name}.{n}": p for n, p in item.named_parameters()}
        else:
            inside = {name: item} if isinstance(item, nn.Parameter) else {}
        found.update({n: p for n, p in inside.items() if id(p) not in known})
    return found


def tensors_in_attributes(model: nn.Module, known: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of torch's own kinds in plain attributes of modules, also in lists and dicts there, that are none of the
    parameters `known`.

    Raises:
        GTPStateError: one of them is a parameter on the meta device.
    """
    direct = (
        (f"{prefix}.{attribute}".removeprefix("."), value)
        for prefix, module in model.named_modules()
        for attribute, value in vars(module).items()
    )
    for name, value in (*direct, *_in_attributes(model)):
        if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
            continue
        if id(value) not in known:
            yield name, value
        elif value.is_meta:
            raise GTPStateError(
                f"{name} is a parameter on the meta device that is kept in a plain attribute, too, and gtp.shard_model "
                "puts another object in its place where torch knows it. Take it from its module when it is used, or "
                "build the model on a real device"
            )


def _in_attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules hold in lists, tuples and dicts that are plain attributes."""
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            items = (
                value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
            )
            for key, item in items:
                yield f"{prefix}.{attribute}[{key!r}]".removeprefix("."), item

"""What would make another model of a sharded one (`model.to(dtype)`, scripting) is refused before anything has changed.

torch converts a module parameter by parameter, children first, and a weight that refuses leaves those before it
converted. So modules that hold sharded weights, themselves or in their children, ask all of these beforehand. torch
looks up `_apply` and `__prepare_scriptable__` on the object, which so can answer without a class of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gtp.errors import GTPStateError, UnsupportedError
from gtp.weights.functions import refused_move
from gtp.weights.parameter import GTPWeight

Conversion = Callable[[torch.Tensor], torch.Tensor]


def refuse_conversions(root: nn.Module) -> None:
    """Makes every module of `root` that holds sharded weights refuse to be scripted, and to be converted in part.

    Conversions that change neither dtype nor device type go through.
    """
    for name, module in root.named_modules():
        if any(isinstance(parameter, GTPWeight) for parameter in module.parameters()):
            # past nn.Module.__setattr__, which has nothing to say to functions, and past what mypy thinks of methods
            vars(module)["_apply"] = _all_or_nothing(module)
            vars(module)["__prepare_scriptable__"] = _refuses_scripting(name or type(module).__name__)


def _all_or_nothing(module: nn.Module) -> Callable[..., nn.Module]:
    reference = weakref.ref(module)  # the module holds this function

    def apply(convert: Conversion, recurse: bool = True) -> nn.Module:
        mine = reference()
        if mine is None:
            raise GTPStateError(
                "this module is a shallow copy of a sharded one that is gone, and can neither be moved nor converted"
            )
        _require_unconverted(mine, convert, recurse)
        converted: nn.Module = type(mine)._apply(mine, convert, recurse)
        return converted

    return apply


@torch.no_grad()
def _require_unconverted(module: nn.Module, convert: Conversion, recurse: bool) -> None:
    """
    Raises:
        GTPValueError: sharded weights would get another dtype or shape.
        UnsupportedError: they would be moved to another kind of device.
    """
    tried: set[tuple[torch.dtype, torch.device]] = set()
    for parameter in module.parameters(recurse):
        if isinstance(parameter, GTPWeight) and (kind := (parameter.dtype, parameter.device)) not in tried:
            tried.add(kind)
            # a stranger of its shape, because the conversion may write, and comes to the weight itself later
            converted = convert(torch.empty_like(parameter.shard))
            if converted.device.type != parameter.device.type:
                raise refused_move(parameter, parameter.device, converted.device)
            parameter.require_kind(converted)


def _refuses_scripting(name: str) -> Callable[[], Any]:
    def refuse() -> Any:
        raise UnsupportedError(
            f"{name}: it is sharded, and torch.jit.script would compile it with this rank's rows in place of weights. "
            "Script the plain model; torch.compile works with sharded ones"
        )

    return refuse

"""Inputs that would meet a shard before `GTPWeight` hears of it.

Of two arguments with a `__torch_function__` of their own torch asks the first, and in `F.linear(x, weight)` that is the
input. One that runs the function past everybody else's rules, as torch's nested tensors do, would be multiplied by this
rank's rows. The weight is not asked, so its module is: by a class of its own, as FSDP2 gives to modules. A hook would
cost more at every call, and torch graphs no module that has one (`torch.cuda.make_graphed_callables`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gtp.errors import UnsupportedError
from gtp.weights.parameter import GTPWeight

_PLAIN = (torch.Tensor, nn.Parameter)


def refuse_foreign_inputs(root: nn.Module) -> None:
    """Makes the modules of `root` that give a sharded weight to torch's functions look at the type of their input."""
    classes: dict[type, type] = {}  # one for all modules of a class
    for module in root.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and isinstance(module._parameters.get("weight"), GTPWeight):
            kind = type(module)
            if kind not in classes:
                classes[kind] = _that_looks(kind)
            module.__class__ = classes[kind]


def _that_looks(kind: Any) -> Any:
    """A subclass of a class of modules, under its name, that refuses foreign inputs."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if type(value) not in _PLAIN and isinstance(value, torch.Tensor) and _answers_first(type(value)):
                raise _refused(self, type(value))
        return kind.forward(self, *args, **kwargs)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, **names})


def _refused(module: nn.Module, kind: type[torch.Tensor]) -> UnsupportedError:
    weight: Any = module._parameters.get("weight")
    return UnsupportedError(
        f"{weight.name}: the input is a {kind.__name__}, whose own rules for torch functions would compute with this "
        "rank's rows in place of the weight. Give the layer plain tensors (of a nested tensor: .values(), or padded "
        "ones), or leave the weight unsharded with gtp.shard_model(exclude=...)"
    )


def _answers_first(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors computes what it is given with other classes: torch's own rule leaves it to them."""
    rule: Any = kind.__torch_function__
    if rule is torch._C._disabled_torch_function_impl or issubclass(kind, GTPWeight):
        return False
    return getattr(rule, "__func__", rule) is not torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

"""Inputs that would meet a shard before `GTPWeight` hears of it.

Of two arguments with a `__torch_function__` of their own torch asks the first, and in `F.linear(x, weight)` that is the
input. torch's nested and masked tensors run the function past everybody else's rules, and would be multiplied by this
rank's rows. The weight is not asked, so its module is, in its `forward`: a hook would cost several times as much at
every call, and torch graphs no module that has one (`torch.cuda.make_graphed_callables`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gtp.errors import UnsupportedError
from gtp.weights.parameter import GTPWeight

_PLAIN = (torch.Tensor, nn.Parameter)


def refuse_foreign_inputs(root: nn.Module) -> None:
    """Makes the modules of `root` that give a sharded weight to torch's functions look at the type of their input."""
    for module in root.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and isinstance(module._parameters.get("weight"), GTPWeight):
            vars(module)["forward"] = _after_a_look(module)


def _after_a_look(module: nn.Module) -> Callable[..., Any]:
    """The module's forward behind a look at its arguments. It holds the module weakly, being held by it."""
    alive = weakref.ref(module)
    own: Callable[..., Any] | None = vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        module: Any = alive()
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind not in _PLAIN and isinstance(value, torch.Tensor) and _answers_first(kind):
                raise _refused(module, kind)
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return forward


def _refused(module: nn.Module, kind: type[torch.Tensor]) -> UnsupportedError:
    weight: Any = module._parameters.get("weight")
    return UnsupportedError(
        f"{weight.name}: the input is a {kind.__name__}, whose own rules for torch functions would compute "
        "with this rank's rows in place of the weight. Give the layer plain tensors (of a nested tensor: "
        ".values(), or padded ones), or leave the weight unsharded with gtp.shard_model(exclude=...)"
    )


def _answers_first(kind: type[torch.Tensor]) -> bool:
    """Whether it is a class of torch's with rules of its own. Of others' one cannot know whether they ask others."""
    rule: Any = kind.__torch_function__
    if rule is torch._C._disabled_torch_function_impl or kind.__module__.partition(".")[0] != "torch":
        return False
    return getattr(rule, "__func__", rule) is not torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

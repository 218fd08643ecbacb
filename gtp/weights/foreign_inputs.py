"""Inputs that would meet a shard before `GTPWeight` hears of it.

Of two arguments with a `__torch_function__` of their own torch asks the first, and in `F.linear(x, weight)` that is the
input. torch's nested and masked tensors run the function past everybody else's rules, and would be multiplied by this
rank's rows. The weight is not asked, so its module is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gtp.errors import UnsupportedError
from gtp.weights.forwards import wrap_forward
from gtp.weights.parameter import GTPWeight

_PLAIN = (torch.Tensor, nn.Parameter)


def refuse_foreign_inputs(root: nn.Module) -> None:
    """Makes the modules of `root` that give a sharded weight to torch's functions look at the type of their input."""
    for module in root.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and isinstance(module._parameters.get("weight"), GTPWeight):
            wrap_forward(module, _look_first)


def _look_first(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind not in _PLAIN and isinstance(value, torch.Tensor) and _answers_first(kind):
            raise _refused(module, kind)
    return forward(*args, **kwargs)


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

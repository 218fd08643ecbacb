"""What would make another program of a sharded model, `torch.jit.script`, is refused before it looks at the weights.

torch looks up `__prepare_scriptable__` on the object, which so can answer without a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gtp.errors import UnsupportedError
from gtp.weights.parameter import GTPWeight


def refuse_scripting(root: nn.Module) -> None:
    """Makes every module of `root` that holds sharded weights, itself or in its children, refuse to be scripted."""
    for name, module in root.named_modules():
        if any(isinstance(parameter, GTPWeight) for parameter in module.parameters()):
            # past nn.Module.__setattr__, which has nothing to say to functions, and past what mypy thinks of methods
            vars(module)["__prepare_scriptable__"] = _refusal(name or type(module).__name__)


def _refusal(name: str) -> Callable[[], Any]:
    def refuse() -> Any:
        raise UnsupportedError(
            f"{name}: it is sharded, and torch.jit.script would compile it with this rank's rows in place of weights. "
            "Script the plain model; torch.compile works with sharded ones"
        )

    return refuse

"""Forwards of modules that do something of gtp's around what they did.

Not by hooks: torch's way around a module that has one costs more at every call, and torch graphs no such module
(`torch.cuda.make_graphed_callables`). Not by a class of ours: users look at classes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Makes a forward of `module` `run(module, forward, args, kwargs)`.

    There, `forward` is what it was, of its class or of its own. The module is held weakly, being the holder.
    """
    alive = weakref.ref(module)
    own: Callable[..., Any] | None = vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        module: Any = alive()
        return run(module, own or functools.partial(type(module).forward, module), args, kwargs)

    with contextlib.suppress(ValueError):  # what is written in C may have none
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    # past nn.Module.__setattr__, which has nothing to say to functions
    vars(module)["forward"] = forward
    before: Callable[[], Any] | None = vars(module).get("__getstate__")
    vars(module)["__getstate__"] = before or functools.partial(_state_of_a_copy, alive, own)


def _state_of_a_copy(alive: Callable[[], Any], own: Callable[..., Any] | None) -> Any:
    """What `copy.copy(module)` takes over, which asks the object: the forward above would run on the module copied."""
    module: Any = alive()
    kind: Any = type(module)
    state = kind.__getstate__(module)
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in ("forward", "__getstate__")}
        if own is not None:
            state["forward"] = own
    return state

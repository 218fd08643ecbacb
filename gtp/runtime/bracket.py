"""`Bracket`: a runtime's hooks around the forwards of its root module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from gtp.runtime.runtime import GTPRuntime

WHY_GRAPHS_BREAK: Final = "gtp gathers weights and reduces gradients outside of graphs: compile without fullgraph=True"
"""What torch.compile(fullgraph=True) shows a user."""


class Bracket:
    """Who copies or pickles the model comes from these hooks to `GTPRuntime.__reduce__`, which says what to do."""

    def __init__(self, runtime: GTPRuntime) -> None:
        self._runtime = runtime
        # Dynamo must not trace the bookkeeping. Decorated here and not at import, which would load Dynamo for
        # everybody.
        self._enter = torch.compiler.disable(runtime.enter_forward, reason=WHY_GRAPHS_BREAK)
        self._leave = torch.compiler.disable(runtime.exit_forward, reason=WHY_GRAPHS_BREAK)

    def before(self, module: torch.nn.Module, args: Any) -> None:
        self._enter()

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._leave()

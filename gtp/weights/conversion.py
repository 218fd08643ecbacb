"""What hangs on a parameter that is made a `GTPWeight`: graphs of before, and hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.graph import get_gradient_edge

from gtp.errors import GTPStateError

Hooks = OrderedDict[int, Callable[[torch.Tensor], None]]


def take_over_hooks(parameter: torch.nn.Parameter) -> Hooks:
    """Its post-accumulate-grad hooks, for somebody else to run. Who registered one removes it from the same dict."""
    hooks = cast("Hooks | None", parameter._post_accumulate_grad_hooks)
    if not hooks:
        return OrderedDict()
    parameter._post_accumulate_grad_hooks = OrderedDict()
    return hooks


def let_go_of_graphs(parameter: torch.nn.Parameter, name: str) -> None:
    """Makes graphs of before, which have the full weight, raise in backward, and later ones end in the shard."""
    if not parameter.requires_grad:
        return

    def refuse(grads: Any) -> None:
        raise GTPStateError(
            f"{name}: this backward is of a forward that ran before gtp.shard_model, with the full weight. Run the "
            "forward again"
        )

    get_gradient_edge(parameter).node.register_prehook(refuse)
    # torch keeps the node while such a graph lives, with the full shape, and lets go of it at a change of type alone
    other = torch.float64 if parameter.dtype is torch.float32 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    torch.autograd.graph.increment_version(parameter)  # and where it was saved, torch says that it was changed

"""What torch.compile must leave alone: gathers and reductions, which cannot be traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._compile import _disable_dynamo


def outside_graphs[F: Callable[..., Any]](function: F) -> F:
    """torch.compile breaks its graph where `function` is called.

    Outside of everything compiled it is called as it is. Else by torch's own form of `torch.compiler.disable`, which
    loads Dynamo at the first call and not, for everybody, at import.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


def never_compiled[F: Callable[..., Any]](function: F) -> F:
    """For what autograd's engine calls: where `backward()` is called in compiled code, Dynamo would compile it.

    A mark on the code of `function`, for it and what it calls: costs nothing when it runs.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs a backward that it has traced."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)

"""Programs made by running a model once, in which gathers would be left out or their values baked in, are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from gtp.errors import UnsupportedError
from gtp.ops.compilers import in_compiled_autograd

jit_trace: Callable[[], Any] = torch._C._get_tracing_state
"""The trace that `torch.jit.trace` is recording, or None."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see every operation of torch: those of users, which only look on, and those of tracers."""

without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes
"""Within it no mode sees any operation."""

_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)

fx_trace: Callable[[], bool] = torch.fx._symbolic_trace.is_fx_symbolic_tracing
"""Whether `torch.fx.symbolic_trace` is recording. Where it keeps that differs between releases of torch."""

_TRACERS = (
    (torch._C._TorchDispatchModeKey.PROXY, "make_fx or torch.export"),
    (torch._C._TorchDispatchModeKey.FAKE, "FakeTensorMode"),
)


def in_selective_checkpoint() -> bool:
    """Whether a mode keeps results of operations, or hands out those that it has kept."""
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def refuse_tracing(what: str) -> None:
    """To be called where `jit_trace`, `dispatch_modes` or `fx_trace` answer something, before a weight is gathered.

    Raises:
        UnsupportedError: the forward is being traced.
    """
    tracers = [name for key, name in _TRACERS if torch._C._get_dispatch_mode(key) is not None]
    if jit_trace() is not None:
        tracers.append("torch.jit.trace")
    if not tracers and fx_trace():  # which tracers above use
        tracers.append("torch.fx.symbolic_trace")
    if tracers:
        raise UnsupportedError(
            f"{what}: it is sharded, and {' under '.join(tracers)} would record its forward without the gathers, or "
            "with today's weights for good. Trace the plain model; torch.compile works with sharded ones"
        )


def refuse_compiled_autograd() -> None:
    """To be called where a backward begins.

    Raises:
        UnsupportedError: compiled autograd runs it.
    """
    if in_compiled_autograd():
        raise UnsupportedError(
            "the backward of a sharded model is run by compiled autograd, which tells nobody when it ends. Run it "
            "without (torch._dynamo.config.compiled_autograd = False); torch.compile of the model, or of a step with "
            "its backward, is supported"
        )

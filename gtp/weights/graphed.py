"""`make_graphed_callables`: torch's, for modules with sharded weights."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gtp.runtime.lines import Lines
from gtp.runtime.parts import Part
from gtp.runtime.replicated import is_replicated
from gtp.weights.parameter import GTPWeight
from gtp.weights.rules import plain_access


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> Any:
    """`torch.cuda.make_graphed_callables` for layers of a sharded model. Collective: on every rank in the same order.

    Layers that torch graphs by itself gather each weight when it is needed, and wait for each gradient. Here a layer's
    weights are gathered ahead within the layer, and its gradients are reduced beside its backward. Between layers
    nothing is in flight, so a callable of several layers exposes less, and a graph of the whole step, where the model
    can be captured so, nothing. Gradients of replays are delivered like those of eager code: to `.grad` in
    `GTPConfig.grad_dtype` or to `main_grad`, added up over several backwards and with what eager code adds to the same
    weight, and hooks run when they are complete. To capture a module anew, give it the `forward` of before first. Until
    all is captured Python's garbage collector is off, so garbage of the warm-ups keeps its memory until then.

    Args:
        callables: A module or a tuple of modules, without hooks, whose weights are sharded. Also functions, of which
            torch takes no parameters.
        sample_args: A tuple of tensors for a module; a tuple of such tuples for a tuple of modules.
        num_warmup_iters: Forwards and backwards before the capture. What is gathered ahead is learned in them: with
            less than 2, or where they take another way than the capture, weights are gathered late.
        allow_unused_input, pool: As torch has them.

    Returns:
        What torch returns: the modules, whose forwards replay from now on while they are in the present mode.

    Raises:
        GTPStateError: a forward of the model waits for its backward.
        RuntimeError, AssertionError: torch's, of what cannot be captured.
    """
    several = callables if isinstance(callables, tuple) else (callables,)
    modules = [module for module in several if isinstance(module, nn.Module)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            runtimes = dict.fromkeys([w.handle.runtime for w in module.parameters() if isinstance(w, GTPWeight)])
            with torch.inference_mode(False):
                for runtime in runtimes:
                    runtime.start()
            all_lines = [runtime.lines for runtime in runtimes]
            for lines in all_lines:
                stack.callback(lines.forget_parts)
            stack.enter_context(_forwards_are_parts(module, [(lines, lines.add_part()) for lines in all_lines]))
        stack.enter_context(_no_garbage_collection())
        graphed = torch.cuda.make_graphed_callables(callables, sample_args, num_warmup_iters, allow_unused_input, pool)
    for parameter in dict.fromkeys([p for module in modules for p in module.parameters() if p.requires_grad]):
        if isinstance(parameter, GTPWeight):
            _await_gradients(parameter)
        elif not is_replicated(parameter) and not any(
            isinstance(h, _KeepsFirst) for h in (parameter._backward_hooks or {}).values()
        ):
            parameter.register_hook(_KeepsFirst(parameter))
    return graphed


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects garbage before, and none inside. Graphs of an earlier capture may be among it, and where one is
    destroyed in a thread of autograd's, CUDA gives up the capture that is going on."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _forwards_are_parts(module: nn.Module, parts: list[tuple[Lines, Part]]) -> Iterator[None]:
    """Forwards of the module are those of its parts, one per runtime. Not by hooks, which torch refuses to graph."""
    forward: Callable[..., Any] = module.forward
    own = vars(module).get("forward")

    def bracketed(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for lines, part in parts:
                stack.enter_context(lines.part_forward(part))
            return forward(*args, **kwargs)

    vars(module)["forward"] = bracketed  # torch's new forward calls it where training or eval is not as captured
    try:
        yield
    except BaseException:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
        raise
    finally:
        parts.clear()


def _await_gradients(weight: GTPWeight) -> None:
    """The runtime takes what autograd brings to the weight. See `ReturnedGradients`."""
    if weight.handle.graphed:
        return
    weight.handle.graphed = True
    reference = weakref.ref(weight)

    def arrives(grad: torch.Tensor | None) -> torch.Tensor | None:
        target = reference()
        if grad is None or target is None:  # None: the runtime has delivered it, without autograd
            return None
        return target.handle.runtime.returned.arrives(target, grad)

    def arrived(_: torch.Tensor) -> None:
        target = reference()
        if target is not None:
            target.handle.runtime.returned.arrived(target)

    with plain_access():
        torch.Tensor.register_hook(weight, arrives)  # type: ignore[no-untyped-call]
        torch.Tensor.register_post_accumulate_grad_hook(weight, arrived)  # type: ignore[no-untyped-call]


class _KeepsFirst:
    """A hook of a parameter that no runtime reduces. Autograd would make `.grad` of the first gradient, where the next
    replay writes."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        parameter = self._parameter()
        return grad.clone() if grad is not None and parameter is not None and parameter.grad is None else None

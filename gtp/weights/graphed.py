"""`make_graphed_callables`: torch's, for modules with sharded weights.

[Note: gradients of replays] A replayed backward returns memory of its graph to autograd, which makes that `.grad` where
there is none; the next replay writes there again, and the gradients of several micro-batches would not add up. So the
first one is copied. And autograd calls hooks of its own only, not those that a sharded weight keeps for the runtime to
call, which is not there when a graph is replayed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gtp.runtime.parts import Part
from gtp.runtime.runtime import GTPRuntime
from gtp.weights.parameter import GTPWeight
from gtp.weights.rules import plain_access


def make_graphed_callables(callables: Any, sample_args: Any, **options: Any) -> Any:
    """`torch.cuda.make_graphed_callables` for layers of a sharded model, which takes the same arguments.

    Layers that torch graphs by itself gather each weight when it is needed, and wait for each gradient. Here a layer's
    weights are gathered ahead within the layer, and its gradients are reduced beside its backward. Between layers
    nothing is in flight: a graph of the whole step, where the model can be captured so, is faster still.

    Gradients of sharded weights are in the dtype of the shard, and add up over several backwards. Replay on every rank
    in the same order. To capture a module anew, put its `forward` back first.

    Args:
        callables: A module or a tuple of modules, each with its weights sharded and without hooks. Also functions, of
            which torch takes no parameters.
        sample_args: A tuple of tensors for a module; a tuple of such tuples for a tuple of modules.
        options: `num_warmup_iters`, `allow_unused_input`, `pool`, as torch has them. What is gathered ahead is learned
            in the warm-up: without one, or where it takes another way than the capture, weights are gathered late.

    Returns:
        What torch returns: the modules, whose forwards replay from now on while they are in the present mode.

    Raises:
        GTPStateError: a forward of the model waits for its backward.
        RuntimeError, AssertionError: torch's, of what cannot be captured.
    """
    several = callables if isinstance(callables, tuple) else (callables,)
    modules = [module for module in several if isinstance(module, nn.Module)]
    weights = dict.fromkeys([w for module in modules for w in module.parameters() if isinstance(w, GTPWeight)])
    for weight in weights:
        for handle in weight.handle.graphed:
            handle.remove()  # not to be captured
        weight.handle.graphed = ()
    with contextlib.ExitStack() as stack:
        for module in modules:
            runtimes = dict.fromkeys([w.handle.runtime for w in module.parameters() if isinstance(w, GTPWeight)])
            for runtime in runtimes:
                stack.callback(runtime.forget_parts)
            stack.enter_context(_bracketed(module, [(runtime, runtime.add_part()) for runtime in runtimes]))
        graphed = torch.cuda.make_graphed_callables(callables, sample_args, **options)
    for weight in weights:
        if weight.wants_gradient():
            weight.handle.graphed = _follow(weight)
    return graphed


@contextlib.contextmanager
def _bracketed(module: nn.Module, parts: Sequence[tuple[GTPRuntime, Part]]) -> Iterator[None]:
    """Forwards of the module are forwards of its parts, one per runtime. Not by hooks, which torch refuses to graph."""
    forward: Callable[..., Any] = module.forward
    own = vars(module).get("forward")

    def bracketed(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for runtime, part in parts:
                stack.enter_context(runtime.part_forward(part))
            return forward(*args, **kwargs)

    vars(module)["forward"] = bracketed  # which torch keeps for a module that is in another mode later
    try:
        yield
    except BaseException:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
        raise


def _follow(weight: GTPWeight) -> Sequence[RemovableHandle]:
    """See [Note: gradients of replays]."""
    reference = weakref.ref(weight)
    arrived = False  # and not delivered by the runtime, of which autograd is given None

    def before(grad: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal arrived
        arrived = grad is not None
        target = reference()
        return grad.clone() if grad is not None and target is not None and target.grad is None else None

    def after(_: torch.Tensor) -> None:
        target = reference()
        if arrived and target is not None:
            target.run_gradient_hooks()

    with plain_access():
        return (
            torch.Tensor.register_hook(weight, before),  # type: ignore[no-untyped-call]
            torch.Tensor.register_post_accumulate_grad_hook(weight, after),  # type: ignore[no-untyped-call]
        )

"""`torch.autograd.grad` and `torch.autograd.backward(inputs=...)` with respect to sharded weights.

[Note: weights stay weights in backward] torch calls a function of a subclass past the subclass, which then is a plain
tensor to everything that runs inside. In a backward that is code of the user's, too: a forward that is recomputed, a
hook. It would multiply with the shard as if it were the weight. So torch is given the place of a weight in the graph,
and not the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import get_gradient_edge

from gtp.errors import UnsupportedError
from gtp.weights.rules import call_plain, plain_access, tensors_in

if TYPE_CHECKING:
    from gtp.weights.parameter import GTPWeight


def grad(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`: reduced gradients of the shards, returned by autograd.

    What `torch.cuda.make_graphed_callables` calls, so also what a graphed layer replays.
    """
    weights = [cast("GTPWeight", t) for t in tensors_in((*args, *kwargs.values())) if isinstance(t, kind)]
    if kwargs.get("is_grads_batched"):
        raise UnsupportedError(
            f"{weights[0].label}: torch.autograd.grad(is_grads_batched=True) by a sharded weight is not supported, "
            "because no batch of gradients is reduced over ranks. Call torch.autograd.grad once per gradient"
        )
    outputs, inputs = args
    zeros = bool(kwargs.get("materialize_grads"))
    if zeros:  # torch does not know of which shape, for a place
        kwargs = {**kwargs, "materialize_grads": False, "allow_unused": True}
    with contextlib.ExitStack() as stack:
        for runtime in dict.fromkeys(weight.handle.runtime for weight in weights):
            stack.enter_context(runtime.gradients_returned())
        grads = _run(kind, torch.autograd.grad, (outputs, _places(kind, inputs)), kwargs)
    if zeros:
        every = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        grads = tuple(_zeros_like(kind, t) if g is None else g for g, t in zip(grads, every, strict=True))
    return grads


def backward(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.backward`, with weights among its `inputs`."""
    return _run(kind, torch.autograd.backward, args, {**kwargs, "inputs": _places(kind, kwargs.get("inputs"))})


def _run(kind: type, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(t, kind) for t in tensors_in((*args, *kwargs.values()))):
        return call_plain(func, args, kwargs)  # a frozen one, or one as output: torch says what is wrong with it
    return func(*args, **kwargs)


def _places(kind: type, inputs: Any) -> Any:
    """See [Note: weights stay weights in backward]."""
    if inputs is None or isinstance(inputs, torch.Tensor):
        return _place(kind, inputs)
    return [_place(kind, each) for each in inputs]


def _place(kind: type, tensor: Any) -> Any:
    if not isinstance(tensor, kind):
        return tensor
    with plain_access():
        weight = cast("GTPWeight", tensor)
        return get_gradient_edge(weight) if weight.requires_grad else weight


def _zeros_like(kind: type, tensor: Any) -> torch.Tensor:
    if isinstance(tensor, kind):
        return cast("GTPWeight", tensor).new_gradient().zero_()
    return torch.zeros_like(tensor)

"""`torch.autograd.grad` and `torch.autograd.backward` with sharded weights among their arguments.

[Note: weights stay weights in backward] torch calls a function of a subclass past the subclass, which then is a plain
tensor to everything that runs inside. In a backward that is code of the user's, too: a forward that is recomputed, a
hook. It would multiply with the shard as if it were the weight. So torch is given the weight's gradient edge, and not
the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gtp.errors import GTPValueError, UnsupportedError
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
    if zeros:  # torch does not know of which shape, for an edge
        kwargs = {**kwargs, "materialize_grads": False, "allow_unused": True}
    with contextlib.ExitStack() as stack:
        for runtime in dict.fromkeys(weight.handle.runtime for weight in weights):
            stack.enter_context(runtime.returned.asked_for())
        grads = _run(kind, torch.autograd.grad, (_edges(kind, outputs), _edges(kind, inputs)), kwargs)
    if zeros:
        grads = tuple(_zeros_like(kind, t) if g is None else g for g, t in zip(grads, inputs, strict=True))
    return grads


def backward(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.backward`.

    Raises:
        GTPValueError: `inputs` is an iterator, which torch has used up by now.
    """
    inputs = kwargs.get("inputs")
    if isinstance(inputs, Iterator):
        raise GTPValueError(f"backward(inputs=...) takes a list or a tuple of sharded weights, got {type(inputs)}")
    edges = {} if inputs is None else {"inputs": _edges(kind, inputs)}
    return _run(kind, torch.autograd.backward, (_edges(kind, args[0]), *args[1:]), {**kwargs, **edges})


def _run(kind: type, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(t, kind) for t in tensors_in((*args, *kwargs.values()))):
        return call_plain(func, args, kwargs)  # a frozen one: torch says what is wrong with it
    return func(*args, **kwargs)


def _edges(kind: type, tensors: Any) -> Any:
    """See [Note: weights stay weights in backward]."""
    if isinstance(tensors, (torch.Tensor, GradientEdge)):
        return _edge(kind, tensors)
    return [_edge(kind, each) for each in tensors]


def _edge(kind: type, tensor: Any) -> Any:
    if not isinstance(tensor, kind):
        return tensor
    with plain_access():
        weight = cast("GTPWeight", tensor)
        return get_gradient_edge(weight) if weight.requires_grad else weight


def _zeros_like(kind: type, tensor: Any) -> torch.Tensor:
    if isinstance(tensor, kind):
        return cast("GTPWeight", tensor).new_gradient().zero_()
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError("materialize_grads cannot be used when the given input is a GradientEdge")
    return torch.zeros_like(tensor)

"""Dispatchers: the only functions through which ops and modules touch a weight that may be distributed.

All are list-shaped, ask the leader `weights[0]` alone, do nothing to plain tensors, and check what comes back, so that
an implementer's mistake is a `ProtocolError` with the weight's name and not a wrong number three layers later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gtp.errors import ProtocolError
from gtp.protocol.contract import Outcome

# Shards are tensor subclasses: reading `.shape` on one goes through its __torch_function__. The checks below are about
# the plain tensor underneath, and run once per GEMM.
_plain = torch._C.DisableTorchFunctionSubclass

_METHODS = (
    "materialize_group_for_forward",
    "materialize_group_for_backward",
    "finalize_group_grads",
    "grad_buffer",
)


def is_distributed_weight(weight: object) -> bool:
    """Whether `weight` says that it is a `DistributedWeight`.

    Raises:
        ProtocolError: a TypeError; the flag is set on something that is not a `torch.Tensor`: autograd could not save
            it, hooks and optimizers would miss it.
    """
    if not getattr(weight, "is_distributed_weight", False):
        return False
    if not isinstance(weight, torch.Tensor):
        if isinstance(weight, type):
            raise ProtocolError(f"{weight.__name__} is a class of distributed weights: give one of its instances")
        raise ProtocolError(
            f"{type(weight).__name__} sets is_distributed_weight but is not a torch.Tensor. "
            "A DistributedWeight must be a torch.Tensor subclass, so that autograd and optimizers can hold it: "
            "derive it from torch.Tensor or torch.nn.Parameter"
        )
    return True


def materialize_weight_for_forward(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The full weights of one group, for the forward GEMM.

    Args:
        weights: The group, leader first. Per rank `[shard_rows, ...]` if distributed, else plain and returned as is.

    Returns:
        One full weight `[rows, ...]` per entry, in order.

    Raises:
        ProtocolError: `weights` is a tensor and no list of them; the leader lacks a method, or answered the wrong
            count, type or shape, or what is not plain and contiguous.
    """
    if isinstance(weights, torch.Tensor):
        raise _no_list(weights)
    leader: Any = weights[0]
    if not is_distributed_weight(leader):
        return list(weights)
    try:
        answer = leader.materialize_group_for_forward()
    except AttributeError:
        _require_contract(leader)
        raise
    return _full_tensors(weights, answer, "materialize_group_for_forward")


def materialize_weight_for_backward(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The full weights of one group, for the dgrad GEMM. As `materialize_weight_for_forward`."""
    if isinstance(weights, torch.Tensor):
        raise _no_list(weights)
    leader: Any = weights[0]
    if not is_distributed_weight(leader):
        return list(weights)
    try:
        answer = leader.materialize_group_for_backward()
    except AttributeError:
        _require_contract(leader)
        raise
    return _full_tensors(weights, answer, "materialize_group_for_backward")


def weight_grad_buffers(weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The tensors that the wgrad GEMMs write into, one per weight `[rows, ...]`, or `None` for plain weights.

    Contents are undefined: overwrite, do not accumulate.

    Raises:
        ProtocolError: as above; a buffer is not a contiguous tensor of a full weight's shape.
    """
    if isinstance(weights, torch.Tensor):
        raise _no_list(weights)
    if not is_distributed_weight(weights[0]):
        return None
    group: Sequence[Any] = weights
    try:
        buffers = [weight.grad_buffer() for weight in group]
    except AttributeError:
        for weight in group:
            _require_contract(weight)
        raise
    return _full_tensors(weights, buffers, "grad_buffer")


def finalize_weight_grads(weights: Sequence[torch.Tensor], wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Hands fresh full wgrads to the leader and returns what autograd must be given, one entry per weight.

    Args:
        weights: The group, leader first.
        wgrads: Full wgrads `[rows, ...]`, one per weight.

    Returns:
        Per weight a tensor of the shard's shape, or `None` (see `Outcome`). Plain weights: `wgrads` as given.

    Raises:
        ProtocolError: as above; count, type or shape of what the leader answered is not in the contract.
    """
    if isinstance(weights, torch.Tensor):
        raise _no_list(weights)
    leader: Any = weights[0]
    if not is_distributed_weight(leader):
        return list(wgrads)
    if len(wgrads) != len(weights):
        raise ProtocolError(
            f"finalize_weight_grads got {len(wgrads)} wgrads for {len(weights)} weights led by "
            f"{describe_weight(leader)}"
        )
    try:
        answer = leader.finalize_group_grads(wgrads[0] if len(wgrads) == 1 else list(wgrads))
    except AttributeError:
        _require_contract(leader)
        raise
    grads = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if len(grads) != len(weights):
        raise _wrong_count(weights, grads, "finalize_group_grads", "one outcome per weight")
    for index, grad in enumerate(grads):
        if grad is None:
            continue
        if not isinstance(grad, torch.Tensor):
            raise ProtocolError(
                f"finalize_group_grads of {describe_weight(weights[index])} must return a tensor of the shard's shape "
                f"or None, got {type(grad).__name__}"
            )
        with _plain():
            shard_shape, shape = weights[index].shape, grad.shape
        if shape != shard_shape:
            raise ProtocolError(
                f"finalize_group_grads of {describe_weight(weights[index])} promised the shard's shape "
                f"{tuple(shard_shape)}, got {tuple(shape)}"
            )
    return grads


def outcome_of(weight: torch.Tensor, grad: torch.Tensor | None) -> Outcome:
    """Names the outcome of one entry of `finalize_weight_grads`."""
    if grad is None:
        return Outcome.DEFERRED
    if getattr(weight, "grad_added_to_main_grad", False):
        return Outcome.IN_MAIN_GRAD
    return Outcome.READY


def _no_list(weights: torch.Tensor) -> ProtocolError:
    return ProtocolError(
        f"a list of weights was expected, and {describe_weight(weights)} was given, whose rows would be taken for "
        "weights: write [weight]"
    )


def _require_contract(weight: torch.Tensor) -> None:
    """
    Raises:
        ProtocolError: the weight's class lacks a method of the contract.
    """
    missing = [name for name in _METHODS if not hasattr(type(weight), name) and not hasattr(weight, name)]
    if missing:
        raise ProtocolError(
            f"{describe_weight(weight)} says that it is distributed and has no {', '.join(missing)}; a "
            f"DistributedWeight has {', '.join(_METHODS)}"
        )


def _wrong_count(weights: Sequence[torch.Tensor], answer: list[Any], call: str, promised: str) -> ProtocolError:
    return ProtocolError(
        f"{call} of {describe_weight(weights[0])} promised {promised} ({len(weights)}), got {len(answer)}"
    )


def _full_tensors(weights: Sequence[torch.Tensor], answer: Any, call: str) -> list[torch.Tensor]:
    """The answer as a list, checked: for each weight one plain contiguous tensor `[rows, *shard.shape[1:]]`."""
    tensors = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if len(tensors) != len(weights):
        raise _wrong_count(weights, tensors, call, "one full weight per weight")
    with _plain():
        for weight, tensor in zip(weights, tensors, strict=True):
            if isinstance(tensor, torch.Tensor) and not getattr(tensor, "is_distributed_weight", False):
                shape, shard_shape = tensor.shape, weight.shape
                if shape[1:] == shard_shape[1:] and len(shape) == len(shard_shape) and tensor.is_contiguous():
                    continue
            raise ProtocolError(f"{call} of {describe_weight(weight)} {_what_is_wrong(weight, tensor)}")
    return tensors


def _what_is_wrong(weight: torch.Tensor, tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"must return a torch.Tensor, got {type(tensor).__name__}"
    if is_distributed_weight(tensor):
        return f"returned a {type(tensor).__name__} that is distributed itself; a full weight must be a plain tensor"
    with _plain():
        shape, trailing = tuple(tensor.shape), weight.shape[1:]
    if len(shape) != len(trailing) + 1 or shape[1:] != trailing:
        return f"promised [rows, {', '.join(map(str, trailing))}], got {shape}"
    return f"must be contiguous, got strides {tensor.stride()}"


def describe_weight(weight: torch.Tensor) -> str:
    """A weight for an error message: its name where its class gives it one, its class, its shard's shape."""
    # every torch.Tensor has a `name`, None unless its class gives it one
    with _plain():
        shape = tuple(weight.shape)
    name = getattr(weight, "name", None)
    label = f"{name!r} " if isinstance(name, str) and name else ""
    return f"weight {label}({type(weight).__name__}, shard {shape})"

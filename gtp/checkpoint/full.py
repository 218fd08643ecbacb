"""Ordinary state dicts of full tensors, made from a sharded model and read into one, one weight at a time."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gtp.checkpoint.names import held_weights
from gtp.errors import GTPValueError, UnsupportedError
from gtp.weights.agreement import agree
from gtp.weights.axes import Axes, broadcast_first
from gtp.weights.cut import take_shard
from gtp.weights.parameter import GTPWeight
from gtp.weights.shard_tensor import CheckpointableShard, ShardTensor


class IncompatibleKeys(NamedTuple):
    """Names that only the model has, and names that only the state dict has; as `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False) -> OrderedDict[str, Any]:
    """The state dict that the unsharded model would have: full tensors, same keys, same order. Collective.

    Weights are gathered one at a time. The result is a snapshot: its tensors are copies.

    Args:
        model: A sharded model. All its ranks call this together.
        rank0_only: Only the model's first rank keeps the tensors; the others return an empty dict and hold one full
            weight at a time.
        cpu_offload: Each tensor goes to the CPU before the next weight is gathered.

    Returns:
        Name to plain tensor of the logical shape, and extra state as it is.
    """
    agree(held_weights(model), "gather a state dict of")
    sharded = model.state_dict()
    keep = not rank0_only or _is_first_rank(model)
    result: OrderedDict[str, Any] = OrderedDict()
    if hasattr(sharded, "_metadata"):
        result._metadata = sharded._metadata  # type: ignore[attr-defined]  # versions, for load_state_dict
    # tied weights are gathered once, and stay one tensor
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    for key, value in sharded.items():
        if not isinstance(value, torch.Tensor):
            copied = value
        elif (copied := copies.get(_identity(value))) is None:
            copied = value.full_tensor() if isinstance(value, ShardTensor) else value.detach().clone()
            copied = copied.cpu() if cpu_offload else copied
            copies[_identity(value)] = copied if keep else copied.new_empty(0)
        if keep:
            result[key] = copied
    return result


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> IncompatibleKeys:
    """Loads an ordinary state dict of full tensors into a sharded model. Collective if broadcast.

    Args:
        model: A sharded model.
        state_dict: Name to full tensor. With `broadcast_from_rank0` only the one of the model's first rank is read, and
            the others pass None.
        broadcast_from_rank0: The first rank sends each rank its rows, one module's weights at a time. The other ranks
            never hold a full weight.
        strict: Whether names that only the model or only the dict has are an error.

    Returns:
        The names that did not match.

    Raises:
        GTPValueError: names (if strict) or shapes that do not fit, or no state dict. On all ranks, before any change.
        UnsupportedError: parts of the model live on different ranks, so no rank can send all of them.
    """
    if not broadcast_from_rank0:
        if state_dict is None:
            raise GTPValueError(
                "load_full_state_dict: state_dict is None. Give each rank the full state dict, or give it to the "
                "first rank and pass broadcast_from_rank0=True on all"
            )
        return IncompatibleKeys(*model.load_state_dict(state_dict, strict=strict))
    agree(held_weights(model), "load a state dict from the first rank into")
    sender = _Sender.of(model)
    own = model.state_dict()
    offers = sender.broadcast_object(_offers(state_dict) if sender.is_here else None)
    if isinstance(offers, str):
        raise GTPValueError(f"load_full_state_dict: {offers}")
    mismatch = _compare(own, offers, strict)
    source = state_dict if sender.is_here and state_dict is not None else {}
    for module, keys in _by_module(model, [key for key in own if key in offers]):
        # no name for what arrives: it must be gone before the next module's arrives
        module.load_state_dict(
            {
                attribute: sender.send(module._parameters.get(attribute), own[key], source.get(key), offers[key])
                for attribute, key in keys.items()
            },
            strict=False,
        )
    return mismatch


class _Offer(NamedTuple):
    """What the first rank has under a name: the shape of a tensor, or an object."""

    shape: tuple[int, ...] | None
    value: Any


@dataclasses.dataclass(frozen=True)
class _Sender:
    """The model's first rank, seen from this one.

    Attributes:
        axes: Groups along which its values reach all ranks of the model.
        is_here: Whether this is the first rank.
        device: Where collectives take tensors.
    """

    axes: Axes
    is_here: bool
    device: torch.device

    @staticmethod
    def of(model: nn.Module) -> _Sender:
        """Finds the rank that is first in the groups of every weight. Collective.

        Raises:
            GTPValueError: nothing is sharded.
            UnsupportedError: there is no such rank, or it does not reach all.
        """
        weights = [p for p in model.parameters() if isinstance(p, GTPWeight)]
        if not weights:
            raise GTPValueError(
                "load_full_state_dict(broadcast_from_rank0=True): no parameter of the model is sharded; call "
                "gtp.shard_model first, or load on each rank"
            )
        device = weights[0].device
        first: dict[Axes, tuple[int, int]] = {}
        for weight in weights:
            axes = _axes(weight)
            if axes not in first:
                rank = torch.tensor([dist.get_rank()], device=device)
                broadcast_first(rank, axes)
                replicas = 1 if axes.replicate is None else axes.replicate.size()
                first[axes] = (int(rank.item()), axes.gtp.size() * replicas)
        if len(set(first.values())) > 1:
            raise UnsupportedError(
                "load_full_state_dict(broadcast_from_rank0=True): the model's weights live on different sets of "
                f"ranks (first rank and count: {sorted(set(first.values()))}), so no rank can send all. Give each "
                "rank its state dict, or load through a file with gtp.checkpoint"
            )
        ((sender, _),) = set(first.values())
        return _Sender(_axes(weights[0]), sender == dist.get_rank(), device)

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's value, on all ranks."""
        box = [value]
        for group in reversed(self.axes.all):
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        return box[0]

    def send(self, parameter: torch.nn.Parameter | None, own: Any, value: Any, offer: _Offer) -> Any:
        """What `load_state_dict` of one module takes for one name: a shard, a whole tensor or an object.

        Args:
            parameter: The parameter of that name, if it is one.
            own: What this rank's model has under the name.
            value: What the first rank's dict has; None on other ranks.
            offer: What all know of it.
        """
        if offer.shape is None:
            return offer.value
        if isinstance(parameter, GTPWeight) and isinstance(own, ShardTensor):
            return _send_rows(parameter, own, value)
        dtype = own.dtype if isinstance(own, torch.Tensor) else offer.value
        received = torch.empty(offer.shape, dtype=dtype, device=self.device)
        if value is not None:
            received.copy_(value)
        broadcast_first(received, self.axes)
        return received


def _send_rows(weight: GTPWeight, own: ShardTensor, value: torch.Tensor | None) -> ShardTensor:
    axes, layout = _axes(weight), weight.layout
    shard = torch.empty_like(own.shard)
    if axes.replicate is None or axes.replicate.rank() == 0:
        pieces = (
            None
            if value is None
            else [take_shard(value, layout.for_rank(r), shard.device).to(shard.dtype) for r in range(axes.gtp.size())]
        )
        dist.scatter(shard, pieces, src=dist.get_global_rank(axes.gtp, 0), group=axes.gtp)
    if axes.replicate is not None:
        dist.broadcast(shard, src=dist.get_global_rank(axes.replicate, 0), group=axes.replicate)
    return ShardTensor(shard, own.origin)


def _offers(state_dict: Mapping[str, Any] | None) -> dict[str, _Offer] | str:
    """What the first rank can send, or why it cannot."""
    if state_dict is None:
        return "the model's first rank was given None; it is the one that needs the state dict"
    offers: dict[str, _Offer] = {}
    for key, value in state_dict.items():
        if isinstance(value, CheckpointableShard) or hasattr(value, "device_mesh"):
            return f"{key}: the state dict holds a {type(value).__name__}, and full tensors are needed"
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and (value.is_meta or value.is_nested or value.layout is not torch.strided):
            kind = "on the meta device" if value.is_meta else "sparse or nested"
            return f"{key}: the state dict holds a tensor that is {kind}, which cannot be sent; dense values are needed"
        if not is_tensor and (why := _unpicklable(value)):
            return f"{key}: the state dict holds a {type(value).__name__} that cannot be sent: {why}"
        offers[key] = _Offer(tuple(value.shape), value.dtype) if is_tensor else _Offer(None, value)
    return offers


def _unpicklable(value: Any) -> str:
    """Why not; empty if it can be pickled."""
    try:
        pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any code of the value's class may have run
        return f"{type(error).__name__}: {error}"
    return ""


def _compare(own: Mapping[str, Any], offers: Mapping[str, _Offer], strict: bool) -> IncompatibleKeys:
    mismatch = IncompatibleKeys([key for key in own if key not in offers], [key for key in offers if key not in own])
    if strict and (mismatch.missing_keys or mismatch.unexpected_keys):
        raise GTPValueError(
            f"load_full_state_dict: missing keys {mismatch.missing_keys}, unexpected keys "
            f"{mismatch.unexpected_keys}. Pass strict=False to load what both have"
        )
    for key, value in own.items():
        offer = offers.get(key)
        # extra state may have any size
        if offer is None or not isinstance(value, torch.Tensor) or key.endswith("_extra_state"):
            continue
        if offer.shape != tuple(value.shape):
            holds = f"a {type(offer.value).__name__}, no tensor" if offer.shape is None else f"shape {offer.shape}"
            raise GTPValueError(f"{key}: the state dict holds {holds}, and the model has {tuple(value.shape)}")
    return mismatch


def _by_module(model: nn.Module, keys: list[str]) -> list[tuple[nn.Module, dict[str, str]]]:
    """Modules with the keys that are theirs, by the name in the module. Keys that hooks made up go to the root."""
    modules = dict(model.named_modules(remove_duplicate=False))
    grouped: dict[str, dict[str, str]] = {}
    for key in keys:
        prefix, _, attribute = key.rpartition(".")
        if prefix in modules:
            grouped.setdefault(prefix, {})[attribute] = key
        else:
            grouped.setdefault("", {})[key] = key
    return [(modules[prefix], names) for prefix, names in grouped.items()]


def _axes(weight: GTPWeight) -> Axes:
    return Axes(weight.group, weight.handle.group.replicate_group)


def _is_first_rank(model: nn.Module) -> bool:
    """Whether no group of any weight has a lower rank than this one."""
    groups = {group for p in model.parameters() if isinstance(p, GTPWeight) for group in _axes(p).all}
    return all(dist.get_rank(group) == 0 for group in groups)


def _identity(value: torch.Tensor) -> tuple[Any, ...]:
    local = value.shard if isinstance(value, ShardTensor) else value
    # memory without bytes has no address
    return (local.data_ptr() or id(value), value.shape, value.stride())

"""Optimizer state by parameter name, with shards that say which rows they are.

The structure is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, so checkpoints of plain
models and of sharded ones are read by both: `{"state": {name: {key: value}}, "param_groups": [{"params": [names],
...}]}`. Unlike torch's function, this one does not take a fake step with an optimizer that has no state yet, which
would begin its count of steps at one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gtp.checkpoint.names import parameter_names
from gtp.errors import GTPValueError, UnsupportedError
from gtp.weights.parameter import GTPWeight
from gtp.weights.shard_tensor import ShardTensor
from gtp.weights.state_dict import as_saved, own_rows

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def optimizer_state_dict(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """The state of one or several optimizers of `model`, by parameter name. Local; tensors share storage.

    Args:
        model: A model, sharded or not.
        optimizers: Optimizers over its parameters. No parameter is in two of them.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [...]}`. Tensors of a shard's shape are `ShardTensor`s of the
        logical shape; scalars and the state of replicated parameters are as the optimizer has them.

    Raises:
        GTPValueError: an optimizer holds a parameter that the model does not have, or two hold the same.
        UnsupportedError: state of a sharded weight that is neither a scalar nor of the shard's shape.
    """
    names = parameter_names(model)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    holders: dict[str, str] = {}
    for optimizer in as_list(optimizers):
        packed = optimizer.state_dict()
        parameters = held_parameters(optimizer, names)
        for name in dict.fromkeys(names[id(p)] for p in parameters):
            if name in holders:
                raise GTPValueError(
                    f"{name}: it is in two optimizers, {holders[name]} and {type(optimizer).__name__}, and a "
                    "checkpoint has one state of each parameter. Save one of them to a folder of its own"
                )
            holders[name] = type(optimizer).__name__
        for index, values in packed["state"].items():
            if not isinstance(index, int):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps state under {index!r}, which belongs to no parameter; gtp "
                    "cannot tell whether ranks agree on it. Save it yourself, as an extra of gtp.checkpoint.save"
                )
            parameter = parameters[index]
            name = names[id(parameter)]
            state[name] = {key: _as_saved(value, parameter, f"{name}: {key}") for key, value in values.items()}
        for group in packed["param_groups"]:
            groups.append({**group, "params": [names[id(parameters[index])] for index in group["params"]]})
    return {"state": state, "param_groups": groups}


@torch.inference_mode(False)  # state made in it could not be stepped
def load_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    state_dict: Mapping[str, Any],
    *,
    saved_dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Puts what `optimizer_state_dict` returned, or a file held, into optimizers of `model`.

    Args:
        model: A model, sharded or not.
        optimizers: Optimizers over its parameters. They may divide the parameters in another way among optimizers, but
            parameters of one group must come from one group.
        state_dict: By name. State of a sharded weight may be rows of its layout (`ShardTensor`, `ShardRows`), or the
            full tensor, which is cut to this rank's rows.
        saved_dtypes: Dtype that each parameter had when its state was saved. State of parameters that still have it
            keeps its own dtype exactly; otherwise, as in torch, floating state is cast to the parameter's dtype.

    Raises:
        GTPValueError: a parameter is in no saved group, a group's parameters come from several, a shape is wrong, or
            the state is that of another kind of optimizer.
    """
    names = parameter_names(model)
    for optimizer in as_list(optimizers):
        parameters = held_parameters(optimizer, names)
        index_of = {names[id(p)]: i for i, p in enumerate(parameters)}
        groups = [_saved_group(g, names, state_dict["param_groups"], index_of) for g in optimizer.param_groups]
        state = {
            index: {
                key: _as_held(value, parameters[index], f"{name}: {key}")
                for key, value in state_dict["state"][name].items()
            }
            for name, index in index_of.items()
            if name in state_dict["state"]
        }
        _load(optimizer, {"state": state, "param_groups": groups})
        _undo_casts(optimizer, parameters, names, state, saved_dtypes or {})


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """One or several optimizers, as a list."""
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def held_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[torch.Tensor]:
    """All parameters of an optimizer in the order of its packed state dict.

    Raises:
        GTPValueError: one of them is not in the model.
    """
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in parameters if id(p) not in names]
    if strangers:
        raise GTPValueError(
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that the model does not have (shapes "
            f"{strangers[:3]}). Make the optimizer from this model's parameters, after gtp.shard_model when the "
            "model was on the meta device"
        )
    return parameters


def _as_saved(value: Any, parameter: torch.Tensor, label: str) -> Any:
    if not isinstance(parameter, GTPWeight):
        return value
    if not isinstance(value, torch.Tensor):
        if _holds_tensor(value):
            raise UnsupportedError(
                f"{label}: state of a sharded weight inside a {type(value).__name__}; gtp saves tensors"
            )
        return value
    layout = parameter.layout
    if tuple(value.shape) == layout.shard_shape:
        return as_saved(parameter, value)
    if value.dim() == 0 or value.numel() == 1:
        return value
    raise UnsupportedError(
        f"{label}: state of shape {tuple(value.shape)} for a weight of which this rank holds {layout.shard_shape} "
        f"of {layout.logical_shape}. State of the shard's shape and scalars can be saved; this optimizer works on "
        "more than elements, and on a shard its result may be wrong, too"
    )


def _as_held(value: Any, parameter: torch.Tensor, label: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_inference():
        value = value.clone()  # torch keeps what it is given, and could not step it
    if not isinstance(parameter, GTPWeight):
        return value
    if not isinstance(value, ShardTensor) and value.numel() == 1 and value.shape != parameter.logical_shape:
        return value
    return parameter.local_state(own_rows(value, parameter.layout, label))


def _saved_group(
    group: Mapping[str, Any], names: Mapping[int, str], saved: Sequence[Mapping[str, Any]], index_of: Mapping[str, int]
) -> dict[str, Any]:
    wanted = [names[id(p)] for p in group["params"]]
    sources = [i for i, candidate in enumerate(saved) if not set(wanted).isdisjoint(candidate["params"])]
    if not wanted:
        return {**group, "params": []}
    found = {name for i in sources for name in saved[i]["params"]}
    absent = [name for name in wanted if name not in found]
    if absent:
        raise GTPValueError(
            f"{absent[0]}: in no parameter group of the saved optimizer state ({len(absent)} such parameters). Save "
            "all optimizers of the model, and give gtp.checkpoint.load the same ones"
        )
    if len(sources) > 1:
        raise GTPValueError(
            f"{wanted[0]}: its parameter group takes parameters from {len(sources)} saved groups, whose settings "
            "differ. Make the optimizer with the groups it was saved with"
        )
    # torch keeps an optimizer's own names (of one made from named_parameters) where the saved group has none
    settings = {key: value for key, value in saved[sources[0]].items() if key != "param_names"}
    return {**settings, "params": [index_of[name] for name in wanted]}


def _load(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, undone where settings that it needs are then missing."""
    before = optimizer.state_dict()
    optimizer.load_state_dict(packed)
    # asked afterwards, because optimizers complete what their older versions saved
    groups = zip(before["param_groups"], optimizer.param_groups, strict=True)
    missing = {key: None for had, has in groups for key in had if key in optimizer.defaults and key not in has}
    if missing:
        optimizer.load_state_dict(before)
        raise GTPValueError(
            f"the saved settings have no {', '.join(missing)}, which {type(optimizer).__name__} needs: they are "
            "another optimizer's. Load the model alone (optimizer=None), and let this optimizer begin afresh"
        )


def _undo_casts(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    names: Mapping[int, str],
    loaded: Mapping[int, Mapping[str, Any]],
    saved_dtypes: Mapping[str, torch.dtype],
) -> None:
    """torch casts floating state to the parameter's dtype, and an fp32 momentum of a bf16 weight would be rounded."""
    for index, values in loaded.items():
        parameter = parameters[index]
        held = optimizer.state[parameter]
        keep = saved_dtypes.get(names[id(parameter)]) == parameter.dtype
        for key, value in values.items():
            now = held.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                state = value.to(now.device) if keep else now
                held[key] = parameter.local_state(state) if isinstance(parameter, GTPWeight) else state


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)

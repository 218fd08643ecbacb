"""`save` and `load`: whole training states through torch.distributed.checkpoint (DCP), for any number of ranks.

The files are ordinary DCP checkpoints with the keys `model.NAME` and `optim.state.NAME.KEY`,
`optim.param_groups...`, as torch's own recipe writes them. Tensors have their logical shapes, without padding, so
that other numbers of ranks, other alignments and plain models read and write the same files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gtp.checkpoint.names import held_weights, parameter_names, plain_name, unwrapped
from gtp.checkpoint.optimizer import (
    Optimizers,
    as_list,
    held_parameters,
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from gtp.checkpoint.owners import raised_together, require_one_owner_each
from gtp.checkpoint.saved import Saved
from gtp.errors import GTPValueError, MissingExtraError
from gtp.weights.agreement import agree
from gtp.weights.parameter import GTPWeight
from gtp.weights.state_dict import as_saved

_MODEL, _OPTIM = "model", "optim"
# Extras without tensors are pickled whole: DCP would take dicts apart and turn their keys into strings.
_WHOLE = "gtp.extra"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> None:
    """Writes model, optimizers and extras to the folder `path`. Collective.

    Each rank writes its own rows; what several ranks hold alike is written once, by one of them.

    Args:
        path: A folder that all ranks see. Take a new one for each checkpoint: an interrupted save over an old
            checkpoint leaves neither.
        model: Sharded or plain.
        optimizer: One or several optimizers of the model.
        process_group: The ranks that take part, all that hold a part of the model. Default: all ranks.
        extra: Anything else that is alike on all ranks: a step, a scheduler's state dict, tensors. What differs between
            ranks needs a key per rank (`**{f"random_{rank}": torch.get_rng_state()}`).

    Raises:
        GTPValueError: the model is on the meta device, an extra is named like a part of the file, the optimizer holds a
            stranger, different sets of ranks hold weights of one name, rows of a weight or of its optimizer state are
            missing, or the ranks did not write to one folder.
        UnsupportedError: optimizer state that cannot be split by rows.
    """
    from torch.distributed.checkpoint import save as dcp_save

    _require_numpy()
    reserved = sorted({_MODEL, _OPTIM} & extra.keys())
    if reserved:
        raise GTPValueError(f"gtp.checkpoint.save: {reserved[0]!r} names a part of every checkpoint; rename this extra")
    agree(held_weights(model), "save a checkpoint of")
    state: dict[str, Any] = {_MODEL: {plain_name(k): v for k, v in unwrapped(model).state_dict().items()}}
    _require_memory(state[_MODEL])
    if optimizer is not None:
        state[_OPTIM] = optimizer_state_dict(model, optimizer)
    require_one_owner_each(model, state[_OPTIM]["state"] if optimizer is not None else {}, process_group)
    for name, value in extra.items():
        state[name] = value if _has_tensors(value) else (_WHOLE, value)
    dcp_save(state, checkpoint_id=path, process_group=process_group)
    with raised_together("gtp.checkpoint.save", process_group):
        if not dist.is_initialized() or dist.get_rank(process_group) == 0:
            _require_files(path)


@torch.inference_mode(False)  # state made in it could not be stepped
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint into `model` and optimizers, whatever layout it was written from. Collective.

    Everything is checked against the file's table of contents before anything changes. Each rank reads its own rows.

    Args:
        path: The folder.
        model: Sharded or plain, of the same names and logical shapes.
        optimizer: One or several optimizers of the model, fresh or used. Left alone if None.
        strict: Whether names that only the file or only the model has are an error. If not, what both have is loaded.
        process_group: As in `save`.

    Returns:
        The extras by name.

    Raises:
        GTPValueError: no checkpoint there, names or shapes that do not fit, no optimizer state in it, or a model on the
            meta device.
    """
    from torch.distributed.checkpoint import load as dcp_load

    _require_numpy()
    model = unwrapped(model)
    agree(held_weights(model), "load a checkpoint into")
    state_dict = model.state_dict()
    keys = {plain_name(key): key for key in state_dict}
    optimizers = [] if optimizer is None else as_list(optimizer)
    _require_memory(state_dict)
    with raised_together("gtp.checkpoint.load", process_group):
        saved = Saved.read(path)
        target: dict[str, Any] = {_MODEL: _model_target(saved, {n: state_dict[k] for n, k in keys.items()}, strict)}
        if optimizers:
            target[_OPTIM] = _optimizer_target(saved, model, optimizers, strict)
    extras = [name for name in saved.names() if name not in (_MODEL, _OPTIM)]
    target.update((name, saved.placeholder((name,))) for name in extras)
    _finish_prefetches(model)
    dcp_load(target, storage_reader=saved.reader, process_group=process_group)
    model.load_state_dict({keys[name]: value for name, value in target[_MODEL].items()}, strict=False)
    if optimizers:
        dtypes = {name: saved.tensor((_MODEL, name)) for name in parameter_names(model).values()}
        load_optimizer_state_dict(
            model,
            optimizers,
            target[_OPTIM],
            saved_dtypes={name: entry.properties.dtype for name, entry in dtypes.items() if entry is not None},
        )
    return {name: _unwrap(target[name]) for name in extras}


def _require_files(path: str | os.PathLike[str]) -> None:
    """
    Raises:
        GTPValueError: files of other ranks are not where this rank, which wrote the table of contents, looks for them.
    """
    from torch.distributed.checkpoint import FileSystemReader

    if "://" in os.fspath(path):
        return  # no folder
    names = {info.relative_path for info in FileSystemReader(path).read_metadata().storage_data.values()}
    absent = sorted(name for name in names if not os.path.exists(os.path.join(path, name)))
    if absent:
        raise GTPValueError(
            f"{os.fspath(path)}: {len(absent)} of the checkpoint's {len(names)} files, which other ranks wrote, are "
            f"not there ({', '.join(absent[:3])}), so it is not complete. Give all ranks the same path (a name made "
            "from the time differs between ranks), to a folder that all of them see"
        )


def _require_memory(state_dict: Mapping[str, Any]) -> None:
    """
    Raises:
        GTPValueError: a tensor is on the meta device, where there is nothing to read or write.
    """
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise GTPValueError(
                f"{name}: it is on the meta device and has no values. Give the model memory first, with "
                "gtp.shard_model or, where it stays whole, model.to_empty(device=...)"
            )


def _require_numpy() -> None:
    """torch's checkpoints send their plans between ranks as bytes, through numpy.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "gtp.checkpoint needs the package numpy, which torch's checkpoints use, gtp's extra 'checkpoint': "
            "pip install numpy"
        ) from error


def _model_target(saved: Saved, state_dict: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """What DCP is to fill: the model's own tensors, and placeholders of what is no tensor or sizes itself."""
    there = saved.names(_MODEL)
    if not there:
        raise GTPValueError(
            f"{saved.path}: no entry 'model' (top-level entries: {', '.join(saved.names()[:5])}). "
            "gtp.checkpoint.load reads what gtp.checkpoint.save, or "
            "torch.distributed.checkpoint.save({'model': ...}), wrote; a bare state dict is read with "
            "torch.distributed.checkpoint.load(state_dict := model.state_dict(), ...) and model.load_state_dict"
        )
    _require_same_names(saved, "the model", set(state_dict), set(there), strict)
    target: dict[str, Any] = {}
    for name, value in state_dict.items():
        if name not in there:
            continue
        # extra state may have any size, and only its module knows what to make of it
        is_extra = name.rpartition(".")[2] == "_extra_state"
        if not isinstance(value, torch.Tensor) or is_extra:
            target[name] = saved.placeholder((_MODEL, name))
            continue
        saved.require_shape((_MODEL, name), value.shape)
        target[name] = value
    return target


def _optimizer_target(
    saved: Saved, model: nn.Module, optimizers: list[torch.optim.Optimizer], strict: bool
) -> dict[str, Any]:
    """Fresh tensors for the state that the file has. Optimizers get them when all is read."""
    if not saved.names(_OPTIM):
        raise GTPValueError(f"{saved.path}: no entry 'optim': it was saved without optimizer. Load with optimizer=None")
    names = parameter_names(model)
    held = {names[id(p)]: p for optimizer in optimizers for p in held_parameters(optimizer, names)}
    there = saved.names(_OPTIM, "state")
    # a parameter that never had a gradient has no state, so names that only the optimizers have are no error
    _require_same_names(saved, "the optimizers", set(there) & set(held), set(there), strict)
    state: dict[str, Any] = {}
    for name in there:
        if name in held:
            state[name] = {
                key: _state_target(saved, (_OPTIM, "state", name, key), held[name])
                for key in saved.names(_OPTIM, "state", name)
            }
    return {"state": state, "param_groups": saved.placeholder((_OPTIM, "param_groups")) or []}


def _state_target(saved: Saved, path: tuple[str, ...], parameter: torch.Tensor) -> Any:
    entry = saved.tensor(path)
    if entry is None or not isinstance(parameter, GTPWeight):
        device = parameter.device if entry is not None and entry.size == parameter.shape else None
        return saved.placeholder(path, device)
    if entry.size.numel() == 1 and entry.size != parameter.logical_shape:
        return saved.placeholder(path)
    saved.require_shape(path, parameter.logical_shape)
    shard = torch.zeros(parameter.layout.shard_shape, dtype=entry.properties.dtype, device=parameter.device)
    return as_saved(parameter, shard)


def _require_same_names(saved: Saved, whose: str, wanted: set[str], there: set[str], strict: bool) -> None:
    missing, unexpected = sorted(wanted - there), sorted(there - wanted)
    if strict and (missing or unexpected):
        parts = [
            f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in ((f"only {whose} has", missing), ("only the file has", unexpected))
            if names
        ]
        raise GTPValueError(f"{saved.path}: names differ: {'; '.join(parts)}. To load what both have pass strict=False")


def _finish_prefetches(model: nn.Module) -> None:
    """DCP writes into the shards themselves."""
    for weight in held_weights(model):
        weight.before_write()


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(v) for v in value)
    return isinstance(value, torch.Tensor)


def _unwrap(value: Any) -> Any:
    is_whole = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == _WHOLE
    return value[1] if is_whole else value

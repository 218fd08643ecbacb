"""Plain state dicts of a sharded model: `state_dict()` says which values are shards, `load_state_dict` takes what fits.

Keys, order, shapes and dtypes are the plain model's. The values of sharded weights are `ShardTensor`s, so that no
reader can take a rank's rows for the whole weight (see [Note: checkpoints hold logical rows]).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gtp.errors import GTPValueError, UnsupportedError
from gtp.weights.cut import take_shard
from gtp.weights.layout import ShardLayout
from gtp.weights.parameter import GTPWeight
from gtp.weights.shard_tensor import CheckpointableShard, ShardTensor, is_whole


def hook_state_dict(model: nn.Module) -> None:
    """Registers the hooks that make `state_dict` and `load_state_dict` right on `model` and on its submodules."""
    model.register_load_state_dict_pre_hook(_check_before_any_change)
    for module in model.modules():
        if any(isinstance(p, GTPWeight) for p in module._parameters.values()):
            module.register_state_dict_post_hook(_mark_shards)
            module.register_load_state_dict_pre_hook(_take_own_rows)


def as_saved(weight: GTPWeight, shard: torch.Tensor | None = None) -> torch.Tensor:
    """`weight`, or another tensor of its shard's shape, as state dicts show it. Shares storage.

    Args:
        weight: The weight.
        shard: `[shard_rows, *trailing]`, such as an optimizer's state of it. Default: the weight's own shard.

    Returns:
        A `ShardTensor`; a plain tensor where the shard is the whole weight (one rank, no padding).
    """
    plain = weight.plain_shard() if shard is None else shard.detach().as_subclass(torch.Tensor)
    return plain if is_whole(weight.layout) else ShardTensor(plain, weight.origin)


def require_rows(value: torch.Tensor, layout: ShardLayout, name: str) -> None:
    """Checks that `own_rows` can take this rank's rows from `value`.

    Raises:
        GTPValueError: the shape is another one, or the shard is one of another layout.
        UnsupportedError: a DTensor.
    """
    if hasattr(value, "device_mesh"):
        raise UnsupportedError(
            f"{name}: the state dict holds a DTensor. Pass value.full_tensor(), or load through a file"
        )
    shape = tuple(value.shape)
    if isinstance(value, CheckpointableShard):
        _, theirs = value.checkpoint_part()
        if theirs == layout:
            return
        if theirs.logical_shape == layout.logical_shape:
            raise GTPValueError(
                f"{name}: the state dict holds rank {theirs.rank}'s rows of {theirs.group_size} (alignment "
                f"{theirs.alignment}), and this is rank {layout.rank} of {layout.group_size} (alignment "
                f"{layout.alignment}). Shards move between layouts through a file (gtp.checkpoint.save and load) or "
                "as full tensors (gtp.full_state_dict)"
            )
        shape = theirs.logical_shape
    elif shape == layout.logical_shape:
        return
    # not even this rank's shard: a smaller model's weight may have that shape, and every rank would take all of it
    hint = ""
    if shape == layout.shard_shape:
        hint = (
            ". It has the shape of this rank's shard: rows are taken from what knows that it is rows, as state_dict(), "
            "weight.data and weight.detach() do, and weight.shard does not"
        )
    raise GTPValueError(f"{name}: the state dict holds shape {shape}; a full tensor has {layout.logical_shape}{hint}")


def own_rows(value: torch.Tensor, layout: ShardLayout, name: str) -> torch.Tensor:
    """This rank's shard `[shard_rows, *trailing]` from what a state dict holds; a plain tensor.

    Args:
        value: The full tensor, plain, or the shard, as weight, `ShardRows` or `ShardTensor`. Shards are not copied.
        layout: What is wanted.
        name: For errors.

    Raises:
        GTPValueError, UnsupportedError: as `require_rows`.
    """
    require_rows(value, layout, name)
    if isinstance(value, CheckpointableShard):
        return value.checkpoint_part()[0]
    return take_shard(value, layout)


def _mark_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for attribute, weight in module._parameters.items():
        key = prefix + attribute
        # with keep_vars=True the value is the weight itself, which knows what it is
        if isinstance(weight, GTPWeight) and key in state_dict and not isinstance(state_dict[key], GTPWeight):
            state_dict[key] = as_saved(weight)


def _check_before_any_change(
    root: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    _refuse_assign(local_metadata)
    rewritten: list[str] = []
    for path, module in root.named_modules(prefix=prefix.removesuffix(".")):
        inner = f"{path}." if path else ""
        if _rewrites_values(module, is_root=module is root):
            rewritten.append(inner)
        if not inner.startswith(tuple(rewritten)):  # else what there is now says nothing: `_take_own_rows` checks
            for key, weight, value in _sharded_entries(module, state_dict, inner):
                require_rows(value, weight.layout, key)


def _rewrites_values(module: nn.Module, *, is_root: bool) -> bool:
    """Whether code of the user's may change values for this module, or for those in it, when its turn to load comes: a
    vocabulary that is padded, an older layout of a weight."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    if is_root:  # what comes before our hook has been done
        hooks = hooks[hooks.index(_check_before_any_change) :]
    elif not type(module)._load_from_state_dict.__module__.startswith("torch.nn."):
        return True
    return any(hook not in (_check_before_any_change, _take_own_rows) for hook in hooks)


def _take_own_rows(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    _refuse_assign(local_metadata)
    for key, weight, value in _sharded_entries(module, state_dict, prefix):
        state_dict[key] = own_rows(value, weight.layout, key)


def _sharded_entries(
    module: nn.Module, state_dict: dict[str, Any], prefix: str
) -> list[tuple[str, GTPWeight, torch.Tensor]]:
    """Key, weight and value of the sharded weights of one module that the dict has."""
    found = []
    for attribute, weight in module._parameters.items():
        value = state_dict.get(prefix + attribute)
        if isinstance(weight, GTPWeight) and isinstance(value, torch.Tensor):
            found.append((prefix + attribute, weight, value))
    return found


def _refuse_assign(local_metadata: dict[str, Any]) -> None:
    # torch leaves this mark in the caller's dict, where it would turn the next, copying load into an assigning one
    if local_metadata.pop("assign_to_params_buffers", False):
        raise UnsupportedError(
            "load_state_dict(assign=True) would put plain tensors in the place of sharded weights, and the runtime "
            "would go on with the old ones. The model is unchanged: load with assign=False, or load before "
            "gtp.shard_model"
        )

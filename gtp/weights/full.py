"""`full_weights`: see, and change, the whole weights of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.weights.parameter import GTPWeight


@contextmanager
def full_weights(model: nn.Module, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """The full weights of all sharded parameters of `model` by name, for as long as the context lasts. Collective.

    Memory: the whole model, per rank, inside. For one weight use `weight.full_tensor()`.

    Args:
        model: A sharded model, or a submodule of one.
        write: Whether changes are kept. Each rank keeps its own rows on exit, so all ranks must make the same change.

    Yields:
        Name to plain tensor `[rows, *trailing]` in the shard's dtype.

    Raises:
        GTPValueError: on exit, when a tensor was changed and `write` is False.
    """
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, GTPWeight)}
    full = {name: weight.full_tensor() for name, weight in weights.items()}
    versions = {name: tensor._version for name, tensor in full.items()}
    given = dict(full)
    yield full
    changed = [n for n in weights if full.get(n) is not given[n] or given[n]._version != versions[n]]
    if changed and not write:
        raise GTPValueError(
            f"{', '.join(changed)}: changed inside a read-only full_weights context, and the change is lost. "
            "Use gtp.full_weights(model, write=True)"
        )
    for name in changed:
        weight, tensor = weights[name], full.get(name)
        if tensor is None or tuple(tensor.shape) != weight.layout.logical_shape:
            shape = None if tensor is None else tuple(tensor.shape)
            raise GTPValueError(
                f"{name}: full_weights needs the logical shape {weight.layout.logical_shape}, got {shape}"
            )
        with torch.no_grad():
            weight.runtime.before_write()
            weight.plain_shard()[weight.layout.valid_slice].copy_(tensor[weight.layout.shard_slice])

"""`full_weights`: see, and change, the whole weights of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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
        Name to plain tensor `[rows, *trailing]` in the shard's dtype, without gradient.

    Raises:
        GTPValueError: on exit, when a tensor was changed and `write` is False; when an entry is missing, has another
            shape or belongs to no sharded weight. No weight has changed then.
    """
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, GTPWeight)}
    with torch.inference_mode(False), torch.no_grad():  # tensors that have a version
        full = {name: weight.gathered() for name, weight in weights.items()}
    before = {name: _Seen(tensor, tensor._version, weights[name].shard._version) for name, tensor in full.items()}
    yield full
    strangers = [name for name in full if name not in weights]
    if not write:
        changed = [name for name, weight in weights.items() if before[name].differs(weight, full.get(name))]
        if changed or strangers:
            raise GTPValueError(
                f"{', '.join([*changed, *strangers])}: changed inside a read-only full_weights context, and the change "
                "is lost. Use gtp.full_weights(model, write=True)"
            )
        return
    if strangers:
        raise GTPValueError(
            f"{', '.join(strangers)}: full_weights writes the weights that it yields, and no sharded weight has that "
            f"name. Names are {', '.join(weights)}"
        )
    # `.data` and numpy write without a trace, and what they wrote may lie in the rows of some ranks only: so all is
    # written that nobody else has written in the meantime, which all ranks see alike
    written = [name for name, weight in weights.items() if before[name].may_differ(weight, full.get(name))]
    for name in written:
        tensor, shape = full.get(name), weights[name].layout.logical_shape
        if tensor is None or tuple(tensor.shape) != shape:
            given = None if tensor is None else tuple(tensor.shape)
            raise GTPValueError(f"{name}: full_weights needs the logical shape {shape}, got {given}")
    with torch.no_grad():
        for name in written:
            weight = weights[name]
            weight.before_write()
            weight.plain_shard()[weight.layout.valid_slice].copy_(full[name][weight.layout.shard_slice])


class _Seen(NamedTuple):
    """A full weight as it was yielded, with its version and its shard's."""

    tensor: torch.Tensor
    version: int
    shard_version: int

    def may_differ(self, weight: GTPWeight, tensor: torch.Tensor | None) -> bool:
        """Whether what the context holds now may not be what was yielded. The same on all ranks."""
        touched = tensor is not self.tensor or tensor._version != self.version
        return touched or weight.shard._version == self.shard_version

    def differs(self, weight: GTPWeight, tensor: torch.Tensor | None) -> bool:
        """Whether what the context holds now is not what was yielded, as far as this rank's rows tell."""
        if tensor is not self.tensor or tensor._version != self.version:
            return True
        if weight.shard._version != self.shard_version:
            return False  # somebody wrote the shard in the meantime: it tells nothing
        mine, theirs = weight.shard[weight.layout.valid_slice], tensor[weight.layout.shard_slice]
        mine, theirs = mine.contiguous(), theirs.contiguous()
        return not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))  # a NaN is itself

"""What ranks must agree on before they write or read one file: who holds the weight of a name, and that it can be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from gtp.checkpoint.names import plain_name, unwrapped
from gtp.errors import GTPValueError
from gtp.weights.parameter import GTPWeight
from gtp.weights.shard_tensor import ShardTensor

_Ranks = tuple[int, ...]


def require_one_owner_each(
    model: nn.Module, optimizer_state: Mapping[str, Mapping[str, Any]], process_group: dist.ProcessGroup | None
) -> None:
    """Refuses to save what would not be one whole tensor in the file. Collective.

    Two sets of ranks that hold sharded weights of one name have different weights: so it is with tensor-parallel
    slices, or with experts that are divided among ranks without names of their own. Stages of a pipeline have
    different names, and pass. Rows of a weight, or of its optimizer's state, are missing where a rank that has them
    does not save, or has lost them.

    Args:
        model: This rank's model.
        optimizer_state: By parameter and key.
        process_group: The ranks that save. Default: all ranks.

    Raises:
        GTPValueError: there is such a name, on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return
    size = dist.get_world_size(process_group)
    held = {plain_name(n): _axes_of(p) for n, p in unwrapped(model).named_parameters() if isinstance(p, GTPWeight)}
    for name, values in optimizer_state.items():
        held.update({f"{name}, {key}": held[name] for key, value in values.items() if isinstance(value, ShardTensor)})
    # most often everything lives on all ranks that save, and a few bytes say so
    everywhere = all(len(gtp) * len(replicate) == size for gtp, replicate in held.values())
    mine = everywhere, hashlib.sha256("\n".join(held).encode()).digest()
    answers: list[tuple[bool, bytes]] = [mine] * size
    dist.all_gather_object(answers, mine, group=process_group)
    if all(answer == (True, mine[1]) for answer in answers):
        return
    everyones: list[dict[str, tuple[_Ranks, _Ranks]]] = [{}] * size
    dist.all_gather_object(everyones, held, group=process_group)
    ranks_here = dist.get_process_group_ranks(process_group)
    for name in dict.fromkeys(name for one in everyones for name in one):
        having = [(rank, *one[name]) for rank, one in zip(ranks_here, everyones, strict=True) if name in one]
        owners = _components(ranks for _, *axes in having for ranks in axes)
        if len(owners) > 1:
            raise GTPValueError(
                f"{name}: ranks {sorted(owners[0])} and ranks {sorted(owners[1])} each hold a weight of this name, "
                "and one file can hold one. If they are different weights (tensor-parallel slices), save each set of "
                "ranks to a folder of its own with process_group=; if they are replicas, shard over a 2-d mesh "
                "(replicate, gtp)"
            )
        _require_all_rows(name, having)


def _require_all_rows(name: str, having: list[tuple[int, _Ranks, _Ranks]]) -> None:
    """
    Args:
        having: Each rank that has rows of this name, with its GTP group and its replicas.
    """
    rank, gtp, _ = having[0]
    there = {ranks.index(one) for one, ranks, _ in having}
    absent = [one for position, one in enumerate(gtp) if position not in there]
    if absent:
        raise GTPValueError(
            f"{name}: rank {rank} saves its rows, and ranks {absent}, which hold the others, do not, so the file would "
            "not have it whole. Save with all ranks that hold a part of the model (process_group=), with the same "
            "optimizers on each, whose state has not been cleared on some ranks alone"
        )


@contextmanager
def raised_together(call: str, process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """What one rank raises inside, because it sees another folder or has another model, all raise. Collective.

    Args:
        call: For the error on the other ranks.
        process_group: The ranks. Default: all ranks.

    Raises:
        GTPValueError: another rank raised.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when all ranks know of it
        mine = error
    answers: list[str | None] = []
    if dist.is_initialized() and dist.get_world_size(process_group) > 1:
        answers = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(answers, mine and f"{type(mine).__name__}: {mine}", group=process_group)
    if mine is not None:
        raise mine
    for index, answer in enumerate(answers):
        if answer is not None:
            raise GTPValueError(f"{call}: rank {index} of {len(answers)} raised {answer}")


def _axes_of(weight: GTPWeight) -> tuple[_Ranks, _Ranks]:
    replicate = weight.handle.group.replicate_group
    own = (dist.get_rank(),)
    return (
        tuple(dist.get_process_group_ranks(weight.group)),
        own if replicate is None else tuple(dist.get_process_group_ranks(replicate)),
    )


def _components(groups: Iterable[_Ranks]) -> list[set[int]]:
    """Ranks that are connected through groups."""
    found: list[set[int]] = []
    for group in groups:
        touching = [component for component in found if not component.isdisjoint(group)]
        found = [component for component in found if component.isdisjoint(group)]
        found.append(set(group).union(*touching))
    return found

"""What ranks must agree on before they write or read one file: who holds the weight of a name, and that it can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from gtp.checkpoint.names import plain_name
from gtp.errors import GTPValueError
from gtp.weights.parameter import GTPWeight

_Ranks = tuple[int, ...]


def require_one_owner_each(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Refuses to save when two sets of ranks hold sharded weights of one name: they are different weights. Collective.

    So it is with tensor-parallel slices, or with experts that are divided among ranks without names of their own.
    Stages of a pipeline have different names, and pass.

    Args:
        model: This rank's model.
        process_group: The ranks that save. Default: all ranks.

    Raises:
        GTPValueError: there is such a name, on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return
    size = dist.get_world_size(process_group)
    held = {plain_name(n): _axes_of(p) for n, p in model.named_parameters() if isinstance(p, GTPWeight)}
    # most often each weight lives on all ranks that save, and one bit says so
    everywhere = all(len(gtp) * len(replicate) == size for gtp, replicate in held.values())
    answers: list[bool] = [False] * size
    dist.all_gather_object(answers, everywhere, group=process_group)
    if all(answers):
        return
    everyones: list[dict[str, tuple[_Ranks, _Ranks]]] = [{}] * size
    dist.all_gather_object(everyones, held, group=process_group)
    for name in dict.fromkeys(name for one in everyones for name in one):
        owners = _components(ranks for one in everyones if name in one for ranks in one[name])
        if len(owners) > 1:
            raise GTPValueError(
                f"{name}: ranks {sorted(owners[0])} and ranks {sorted(owners[1])} each hold a weight of this name, "
                "and one file can hold one. If they are different weights (tensor-parallel slices), save each set of "
                "ranks to a folder of its own with process_group=; if they are replicas, shard over a 2-d mesh "
                "(replicate, gtp)"
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

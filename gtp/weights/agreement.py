"""Ranks that shard different models are told so when they shard, and not by a hang or by mixed weights later."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gtp.config import GTPConfig
from gtp.errors import DesyncError
from gtp.weights.selection import BufferChoice, Choice, Selection

if TYPE_CHECKING:
    from gtp.weights.parameter import GTPWeight

# What may differ between ranks: nothing is decided by it that others must decide alike.
_LOCAL_FIELDS = frozenset(["debug_timeout", "peer_timeout", "reduce_sms"])


def require_agreement(selection: Selection, config: GTPConfig, device: torch.device) -> None:
    """Compares what ranks are about to shard, and with which settings, over every group. Collective.

    Sends 8 bytes per rank and group; only where those differ does the text travel that says what.

    Raises:
        DesyncError: on every rank of a group whose ranks disagree, with the first difference.
    """
    choices, buffers = selection.choices, selection.buffers
    every_axes = [choice.axes for choice in choices] + [buffer.axes for buffer in buffers]
    for process_group in dict.fromkeys(group for axes in every_axes for group in axes.all):
        mine = [_describe(choice) for choice in choices if process_group in choice.axes.all]
        mine += [_describe_buffer(buffer) for buffer in buffers if process_group in buffer.axes.all]
        mine.append(f"settings {_describe_config(config)}")
        digest = int.from_bytes(hashlib.sha256("\n".join(mine).encode()).digest()[:7])
        own = torch.tensor([digest], dtype=torch.int64, device=device)
        every = own.new_empty(process_group.size())
        dist.all_gather_into_tensor(every, own, group=process_group)
        if bool((every != own).any()):
            _raise_difference(process_group, mine)


def _raise_difference(process_group: dist.ProcessGroup, mine: list[str]) -> None:
    every: list[list[str]] = [[]] * process_group.size()
    dist.all_gather_object(every, mine, group=process_group)
    other = next(rank for rank, theirs in enumerate(every) if theirs != every[0])
    first, second = every[0], every[other]
    place = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    ranks = [dist.get_global_rank(process_group, rank) for rank in (0, other)]
    raise DesyncError(
        f"ranks of group {process_group.group_name} are about to shard different models. Rank {ranks[0]}: "
        f"{_at(first, place)}. Rank {ranks[1]}: {_at(second, place)}. Build the same model with the same arguments of "
        "gtp.shard_model on all ranks"
    )


def _at(lines: list[str], place: int) -> str:
    return lines[place] if place < len(lines) else "nothing more"


def _describe(choice: Choice) -> str:
    parameter = choice.parameter
    how = "sharded" if choice.sharded else "replicated"
    how += ", unsharded in forward" if choice.read_whole else ""
    trained = "" if parameter.requires_grad else ", frozen"
    return f"{' = '.join(choice.names)} {_shape(parameter)}, {how}{trained}"


def _describe_buffer(buffer: BufferChoice) -> str:
    return f"buffer {buffer.name} {_shape(buffer.value)}"


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _describe_config(config: GTPConfig) -> str:
    fields = [f.name for f in dataclasses.fields(config) if f.name not in _LOCAL_FIELDS]
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)


def agree(weights: Iterable[GTPWeight], what: str) -> None:
    """Under `GTPConfig(debug=True)`, compares with the other ranks of each group that all are about to do `what`.

    Raises:
        DesyncError: a rank does something else, or it to other weights, or does not come.
    """
    groups: dict[dist.ProcessGroup, list[GTPWeight]] = {}
    for weight in weights:
        groups.setdefault(weight.group, []).append(weight)
    for group, members in groups.items():
        transport = members[0].runtime.transport
        transport.agree(group, f"{what} {', '.join(weight.name for weight in members)}")

"""Code that takes a shard for the weight where no torch function is called that could be refused.

[Note: who asks] `torch.vmap` over a shard and the broadcasts of DistributedDataParallel and ZeroRedundancyOptimizer
take its memory in C++, past `__torch_function__`. Before, they ask something harmless of each tensor in Python, and
whose code asks is seen on the stack, below what modes of torch functions put there (`torch.set_default_device`). Where
a later torch asks otherwise, the first forward still refuses the wrapper (`gtp.weights.watch`), and tests say that vmap
or the optimizer is no longer noticed.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from gtp.errors import UnsupportedError
from gtp.ops._common import refused_transform

if TYPE_CHECKING:
    from gtp.weights.shard_tensor import LocalShard

_MOST_BETWEEN = 12  # frames: some modes, each with a call or two of its own

ASKED: Final = frozenset(["dim", "detach", "numel"])
"""Names of the harmless functions."""


def refuse_asker(name: str, args: tuple[Any, ...]) -> None:
    """To be called by what `__torch_function__` calls, with a function of `ASKED` and its arguments.

    Raises:
        UnsupportedError: whoever called the function is about to take the shard for the weight.
    """
    if torch.compiler.is_dynamo_compiling():
        return  # neither asks there, and the stack is Dynamo's
    shard: LocalShard = args[0]
    if name == "dim":
        if not shard.origin.is_whole and _calls("torch._functorch.vmap", "_process_batched_inputs"):
            raise refused_transform(f"{shard.label} was given to torch.vmap")
    elif name == "detach":
        if _calls("torch.distributed.utils", "_sync_module_states"):
            raise refused_wrapper(shard.label)
    elif _calls("torch.distributed.optim.zero_redundancy_optimizer", "_partition_parameters"):
        raise UnsupportedError(
            f"{shard.label}: ZeroRedundancyOptimizer divides parameters among ranks and broadcasts what each rank "
            "stepped, which would write one rank's rows over the other ranks'. State of shards is divided already: "
            "take the optimizer itself (torch.optim.AdamW(model.parameters()))"
        )


def refuse_collective(shard: LocalShard, name: str, group: Any) -> None:
    """To be called before a collective of torch takes the memory of the shard.

    Raises:
        UnsupportedError: it is about to run over ranks that hold other rows of the weight.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return  # torch warns, and does nothing
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(ranks.intersection(dist.get_process_group_ranks(shard.origin.process_group))) > 1:
        raise UnsupportedError(
            f"{shard.label} was given to torch.distributed.{name} over ranks that hold other rows of "
            "the weight: they would get each other's. gtp.shard_model makes ranks equal, and gradients are reduced in "
            "backward. The whole is .full_tensor(); for this rank's rows as plain memory take .shard"
        )


def is_collective(func: Any) -> bool:
    """Whether it is one of `torch.distributed`'s, of those that ask `__torch_function__`."""
    return getattr(func, "__module__", "") == dist.distributed_c10d.__name__


def refuse_asking_collective(shard: LocalShard) -> None:
    """As `refuse_collective`; to be called by the method `is_complex`, which collectives call that do not ask
    `__torch_function__`: before torch 2.14 `torch.distributed.broadcast` is one."""
    caller: Any = sys._getframe(2)
    while caller.f_code.co_name.startswith("<"):  # `any(t.is_complex() for t in tensors)`
        caller = caller.f_back
    if caller.f_globals.get("__name__") == dist.distributed_c10d.__name__:
        refuse_collective(shard, caller.f_code.co_name, caller.f_locals.get("group"))


def _calls(module: str, name: str) -> bool:
    """Whether a function of torch has called the present one, with modes and `__torch_function__` in between."""
    frame: FrameType | None = sys._getframe(4)  # who called the function, if there is no mode
    for _ in range(_MOST_BETWEEN):
        if frame is None:
            return False
        if frame.f_code.co_name == name and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


transform_level: Final = torch._C._functorch.maybe_current_level
"""The level of the innermost active transform of torch.func; None outside of all."""


def refused_wrapper(what: str) -> UnsupportedError:
    """The error for DistributedDataParallel and its like around a sharded model, with what to use."""
    return UnsupportedError(
        f"{what}: DistributedDataParallel, or another wrapper that makes ranks' parameters equal, holds it: it would "
        "write one rank's rows over the other ranks', and never see a gradient. gtp.shard_model reduces all gradients "
        "of its model by itself: take the wrapper away. For more ranks shard over a 2-d mesh (replicate, gtp); what "
        "else the wrapper holds belongs into the module that gtp.shard_model is given, with exclude= for what is to "
        "stay whole"
    )

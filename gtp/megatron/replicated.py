"""Parameters that are not sharded are equal on all ranks of the GTP axis, which is a data axis.

Megatron's `DistributedDataParallel.broadcast_params()`, which makes replicas equal that drew random numbers of their
own (`data_parallel_random_init`), goes over replicas of shards and leaves that axis out: routers and embeddings of
positions would differ between its ranks for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from gtp.megatron.experts import gtp_axes
from gtp.megatron.weight import MegatronGTPWeight


def broadcast_replicated(model: nn.Module) -> None:
    """Every parameter of `model` that is whole is that of rank 0 of its GTP axis, the dense or the expert one."""
    dense, expert = gtp_axes()
    for parameter in model.parameters():
        if not isinstance(parameter, MegatronGTPWeight):
            group = dense if getattr(parameter, "allreduce", True) else expert
            if group is not None and group.size() > 1:
                broadcast(parameter.detach(), group)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """In place, from rank 0 of `group`."""
    dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


def _over_gtp_too(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def broadcast_params(ddp: Any) -> None:
        original(ddp)
        if any(isinstance(parameter, MegatronGTPWeight) for parameter in ddp.module.parameters()):
            broadcast_replicated(ddp.module)

    return broadcast_params


METHOD_WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {"DistributedDataParallel.broadcast_params": _over_gtp_too}
)
"""Method of Megatron to what makes its replacement from it."""

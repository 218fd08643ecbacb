"""Shards that DistributedDataParallel is still gathering over replicas (`overlap_param_gather`) must not be sent on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

from gtp.megatron.weight import MegatronGTPWeight

_DDP: Final = "megatron.core.distributed.distributed_data_parallel"


def finish_param_sync_before_forward(root: nn.Module) -> None:
    """Makes every shard below `root` current when its forward begins. To be called before the runtime is attached.

    [Note: parameter all-gathers in flight] With `overlap_param_gather` the optimizer returns before the updated
    parameters have arrived, and DistributedDataParallel waits for a layer's bucket when that layer's forward begins. A
    weight of ours is read earlier, by the gather that prefetches it and by peers; its bucket may be another one. So the
    hooks that would run layer by layer run here for all layers that hold weights, in order of the layers. Each waits
    for its bucket and starts the next, so the all-gathers still overlap each other, though not the forward.
    """

    def before(module: nn.Module, args: Any) -> None:
        for layer, hook in list(_pending(module)):
            hook(layer, ())

    root.register_forward_pre_hook(before)


def _pending(root: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """DistributedDataParallel's own pre-hooks on layers with sharded weights. There are none without the overlap."""
    for layer in root.modules():
        if any(isinstance(p, MegatronGTPWeight) for p in layer._parameters.values()):
            for hook in layer._forward_pre_hooks.values():
                if getattr(hook, "__module__", None) == _DDP:
                    yield layer, hook

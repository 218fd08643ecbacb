"""Shards that DistributedDataParallel is still gathering over replicas (`overlap_param_gather`) must not be sent on."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

from gtp.megatron.weight import MegatronGTPWeight
from gtp.runtime.group import WeightGroup
from gtp.runtime.runtime import GTPRuntime

_DDP: Final = "megatron.core.distributed.distributed_data_parallel"


def wait_for_param_sync(root: nn.Module, runtime: GTPRuntime) -> None:
    """Makes each gather of a weight below `root` wait for its shard. To be called before the runtime is attached.

    [Note: parameter all-gathers in flight] With `overlap_param_gather` the optimizer returns before the updated
    parameters have arrived, and DistributedDataParallel waits for a layer's bucket when that layer's forward begins. A
    weight of ours is read earlier, by the gather that prefetches it; its bucket may be another one. So the hook that
    would run when the layer's forward begins runs before the gather starts. The hooks of all layers before it, in
    order of registration, run first: each waits for its bucket and starts the next one, so every rank starts the
    buckets' all-gathers in DistributedDataParallel's own order, whatever the order of the gathers. What comes later in
    the model stays in flight beside the forward.

    Where peers read shards by themselves (`Transport.peers_read`) all hooks run before the first gather of a forward.
    """
    pending = _PendingLayers()
    runtime.before_gather = pending.finish

    def before(module: nn.Module, args: Any) -> None:
        pending.begin(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        pending.clear()

    root.register_forward_pre_hook(before)
    root.register_forward_hook(after, always_call=True)


class _PendingLayers:
    """DistributedDataParallel's pre-hooks that have not run in this forward, in order of the layers.

    Holds the model within a forward only.
    """

    def __init__(self) -> None:
        self._hooks: collections.deque[tuple[nn.Module, Callable[..., Any]]] = collections.deque()
        self._run = 0  # how many have run
        self._upto: dict[int, int] = {}  # by index of a group: how many must have run before its shards are read

    def begin(self, root: nn.Module) -> None:
        """A forward begins. Without `overlap_param_gather` there are no hooks, and nothing is pending."""
        self.clear()
        for layer, hook in _param_sync_hooks(root):
            self._hooks.append((layer, hook))
            for parameter in layer._parameters.values():
                if isinstance(parameter, MegatronGTPWeight):
                    self._upto[parameter.handle.group.index] = len(self._hooks)

    def clear(self) -> None:
        """The forward has ended, and with it every layer's own hook has run."""
        self._hooks.clear()
        self._upto.clear()
        self._run = 0

    def finish(self, group: WeightGroup) -> bool:
        """The shards of `group` are current afterwards, in the order of the current stream. Whether hooks were run."""
        upto = self._upto.get(group.index, 0)
        ran = self._run < upto
        while self._run < upto:
            layer, hook = self._hooks.popleft()
            self._run += 1
            hook(layer, ())
        return ran


def _param_sync_hooks(root: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """DistributedDataParallel's own pre-hooks on layers that own parameters."""
    for layer in root.modules():
        if layer._parameters:
            for hook in layer._forward_pre_hooks.values():
                if getattr(hook, "__module__", None) == _DDP:
                    yield layer, hook

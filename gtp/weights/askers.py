"""Code that takes a shard for the weight where no torch function is called that could be refused.

[Note: who asks] `torch.vmap` over a shard and the broadcast of DistributedDataParallel take its memory in C++, past
`__torch_function__`. Just before, both ask something harmless of each tensor in Python, and whose code asks is seen on
the stack. Where a later torch asks otherwise, the first forward still refuses the wrapper (`gtp.weights.watch`), and
tests say that vmap is no longer noticed.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch._functorch.vmap import _process_batched_inputs
from torch.distributed.utils import _sync_module_states

from gtp.errors import UnsupportedError
from gtp.weights.shard_tensor import LocalShard

ASKED: Final = frozenset(["dim", "detach"])
"""Names of the harmless functions."""


def refuse_asker(name: str, args: tuple[Any, ...]) -> None:
    """To be called by what `__torch_function__` calls, with a function of `ASKED` and its arguments.

    Raises:
        UnsupportedError: whoever called the function is about to take the shard for the weight.
    """
    shard: LocalShard = args[0]
    code = sys._getframe(3).f_code  # of who called the function; then `__torch_function__`, what it calls, and this
    if name == "dim" and code is _process_batched_inputs.__code__ and not shard.origin.is_whole:
        raise refused_transform(f"{shard.label} was given to torch.vmap")
    if name == "detach" and code is _sync_module_states.__code__:
        raise refused_wrapper(shard.label)


transform_level: Final = torch._C._functorch.maybe_current_level
"""The level of the innermost active transform of torch.func; None outside of all."""


def refused_transform(what: str) -> UnsupportedError:
    """The error for transforms of torch.func, with what to use."""
    return UnsupportedError(
        f"{what}, which does not carry gathers and reductions. Use torch.autograd (loss.backward(), "
        "torch.autograd.grad), and a batch dimension in place of vmap; or transform the plain model"
    )


def refused_wrapper(what: str) -> UnsupportedError:
    """The error for DistributedDataParallel and its like around a sharded model, with what to use."""
    return UnsupportedError(
        f"{what}: DistributedDataParallel, or another wrapper that makes ranks' parameters equal, holds it: it would "
        "write one rank's rows over the other ranks', and never see a gradient. gtp.shard_model reduces all gradients "
        "of its model by itself: take the wrapper away. For more ranks shard over a 2-d mesh (replicate, gtp); what "
        "else the wrapper holds belongs into the module that gtp.shard_model is given, with exclude= for what is to "
        "stay whole"
    )

"""A plain model and its sharded twin, trained side by side and compared after every step. Used inside ranks.

`SideBySide` is what most scenarios of this folder are made of: it builds the model once, shards a copy over all ranks,
and runs the reference of `tests/reference.py` on all ranks' batches while each rank runs its own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.testing.memory import live_full_storages
from tests.reference import Loss, assert_same_gradients, assert_same_parameters, data_parallel_backward

# Several uses of a weight in one backward: autograd adds them on each rank and then ranks are added; gtp adds ranks for
# each use and then uses. Replicated gradients at 4 ranks: the backend's order of addition. Both are fp32 roundings.
ROUNDED = {"rtol": 1e-5, "atol": 1e-6}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def linears(count: int, width: int = 16, *, bias: bool = False) -> nn.Sequential:
    """`count` square Linears with nothing in between: every gathered weight has the same size."""
    return nn.Sequential(*[nn.Linear(width, width, bias=bias) for _ in range(count)])


def square(model: Callable[..., torch.Tensor], batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


def inputs(step: int, *shape: int, count: int | None = None) -> list[torch.Tensor]:
    """Every rank's input of a step, the same list on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator) for _ in range(count or dist.get_world_size())]


def settled[T](measure: Callable[[], T], wanted: Callable[[T], bool]) -> T:
    """What `measure` says as soon as it is `wanted`, or after two seconds: for memory that was given to a collective.

    gloo's threads let go of the tensors of a finished collective a moment after whoever waited for it has gone on.
    """
    for _ in range(40):
        if wanted(value := measure()):
            break
        time.sleep(0.05)
    return value


def live_count(min_bytes: int, at_most: int) -> int:
    """Storages of at least `min_bytes` that are alive, `settled` to be `at_most` so many."""
    return settled(lambda: len(live_full_storages(min_bytes)), lambda count: count <= at_most)


class SideBySide:
    """See the module. Bit-equal unless a tolerance is given.

    Args:
        build: Makes the plain model.
        optimizer: Makes an optimizer from parameters.
        group: Over which ranks; all of them by default.
        shard_options: Further arguments of `gtp.shard_model`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = sgd,
        group: Any = None,
        reduce: str = "mean",
        rtol: float = 0.0,
        atol: float = 0.0,
        **shard_options: Any,
    ) -> None:
        torch.manual_seed(7)
        self.plain = build()
        self.sharded = copy.deepcopy(self.plain)
        self.group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.reduce = reduce
        self.tolerance = {"rtol": rtol, "atol": atol}
        if reduce == "sum":
            shard_options["config"] = gtp.GTPConfig(grad_reduce="sum")
        self.runtime = gtp.shard_model(self.sharded, self.group, **shard_options)
        self.optimizers: list[torch.optim.Optimizer] = []
        if optimizer is not None:
            self.optimizers = [optimizer(_trainable(model)) for model in (self.plain, self.sharded)]

    def backward(self, every: Sequence[Any], loss: Loss = square, *, check: bool = True) -> torch.Tensor:
        """One backward on both sides. Compares the loss and, with `check`, the gradients so far."""
        expected = data_parallel_backward(self.plain, every, loss, reduce=self.reduce)[self.rank]
        value = loss(self.sharded, every[self.rank])
        value.backward()
        torch.testing.assert_close(value.detach(), expected, **self.tolerance)
        if check:
            self.check_gradients()
        return value.detach()

    def check_gradients(self) -> None:
        assert_same_gradients(self.sharded, self.plain, **self.tolerance)

    def check_parameters(self) -> None:
        assert_same_parameters(self.sharded, self.plain, **self.tolerance)

    def update(self) -> None:
        """One optimizer step on both sides, compared."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.check_parameters()

    def step(self, every: Sequence[Any], loss: Loss = square) -> torch.Tensor:
        value = self.backward(every, loss)
        self.update()
        return value


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]

"""Memory per rank, storage by storage: 1/N of weights, gradients and AdamW state, what is replicated, and buffers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gtp
from gtp.testing.memory import live_bytes
from gtp.testing.ranks import rank
from tests.weights.side_by_side import adamw, inputs, settled, square

WIDTH, LAYERS = 64, 16
FULL = WIDTH * WIDTH * 4  # bytes of one full weight
SHARDED, REPLICATED = LAYERS * FULL, LAYERS * 3 * WIDTH * 4  # bytes of all weights; of all biases and norms
COPIES = 4  # a parameter, its gradient, two AdamW states
SMALL = 16 << 10  # the batch, its activations (512 bytes each), AdamW's step counters

# Beside what the config allows ahead and to keep, in full weights of this stack of equal layers; docs, "Memory".
GATHERED = 2  # the one in use and a spare
WGRADS = 6  # four in flight, the one being written, a spare
LATE = 4  # gloo's threads may let go of a finished collective's buffer a moment late: two a pool
RECEIVED = 6  # what the exchange of each wgrad in flight receives, and the sum of the one that is completed


class StoragePeak(TorchDispatchMode):
    """The most bytes alive at once, of storages made inside; autograd's own too, which gc does not see."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                held = StorageWeakRef(storage)
                if held.cdata not in self.alive or self.alive[held.cdata][0].expired():
                    self.alive[held.cdata] = (held, storage.nbytes())
                    if storage.nbytes() > SMALL // 8:
                        self.peak = max(self.peak, self.now())
        return result

    def now(self):
        self.alive = {address: held for address, held in self.alive.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self.alive.values())


def _stack():
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def _bytes_of_steps(config, at_rest):
    """Peak of a learned step; what lies there after it, with and without the pools. Unsharded if there is no config."""
    with StoragePeak() as memory:
        model = _stack()
        runtime = gtp.shard_model(model, dist.group.WORLD, config=config) if config else None
        optimizer = adamw(model.parameters())
        for step in range(3):
            memory.peak = 0
            optimizer.zero_grad()
            square(model, inputs(step, 2, WIDTH)[rank()]).backward()
            optimizer.step()
    steady, of_python = settled(lambda: (memory.now(), live_bytes()), lambda counts: counts[0] == counts[1])
    assert steady == of_python, "what is counted here is not what Python holds"
    if runtime is not None:
        runtime.release()
    # the peak counts what is alive when something is made: what gloo's threads still hold then is part of it
    lasting = settled(memory.now, lambda now: now <= at_rest + SMALL)
    return memory.peak, steady, lasting


@pytest.mark.parametrize("ahead, kept", [(0, 0), (4, 3)])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_share_and_the_configured_buffers(ranks, size, ahead, kept):
    config = gtp.GTPConfig(prefetch_bytes=ahead * FULL, keep_bytes=kept * FULL)
    share = COPIES * (SHARDED // size + REPLICATED)
    buffers = (ahead + kept + GATHERED + WGRADS + LATE) * FULL
    for peak, steady, released in ranks(size).run(_bytes_of_steps, config, share):
        assert share <= released <= share + SMALL
        assert steady <= share + buffers + SMALL
        assert steady <= peak <= share + buffers + RECEIVED * FULL + SMALL


def test_the_same_count_of_the_plain_model_is_the_whole(ranks):
    whole = COPIES * (SHARDED + REPLICATED)
    for peak, steady, _ in ranks(2).run(_bytes_of_steps, None, whole):
        # two temporaries of AdamW
        assert whole <= steady <= peak <= whole + 2 * FULL + SMALL

"""Sharded training on GPUs, every transport: the scenarios of test_shard_model.py, with streams and real delays.

Two ranks share a GPU where there is one: gloo is then the process group, and symmetric memory must allow it. Run:
`TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 pytest -m gpu tests/weights/test_gpu_training.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import gtp
from gtp.testing.ranks import rank, world_size
from tests.reference import assert_same_gradients, assert_same_parameters, data_parallel_backward
from tests.weights.test_shard_model import Model, batches, language_loss

pytestmark = pytest.mark.gpu

TRANSPORTS = ["process_group", "copy_engine"]
SCENARIOS = {
    "plain": {},
    "tied": {"tied": True},
    "repeat": {"repeat": 2},
    "checkpoint": {"use_checkpoint": False},
    "branch": {"branch": True},
    "keep": {"keep_bytes": 1 << 22},
    "alignment": {"alignment": 16},
}


def device_and_group():
    device = torch.device("cuda", rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if torch.cuda.device_count() < world_size():
        return device, dist.group.WORLD
    return device, dist.new_group(backend="nccl", device_id=device)


def train(transport, steps=6, dtype=torch.float32, delays=False, **options):
    device, group = device_and_group()
    config = gtp.GTPConfig(
        transport=transport, keep_bytes=options.pop("keep_bytes", 0), alignment=options.pop("alignment", 1)
    )
    torch.manual_seed(7)
    plain = Model(width=256, vocab=520, **options).to(device=device, dtype=dtype)
    sharded = copy.deepcopy(plain)
    runtime = gtp.shard_model(sharded, group, config=config)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, sharded)]
    # fp32: several uses add in another order, and cuBLAS may choose by memory layout; bf16: one rounding of the mean
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-3)
    for step in range(steps):
        plain.go_left = sharded.go_left = step % 3 != 0
        every = [(ids.to(device), targets.to(device)) for ids, targets in batches(step, vocab=520)]
        losses = data_parallel_backward(plain, every, language_loss)
        if delays:
            torch.cuda._sleep(int(2e7) * ((rank() + step) % 2))
        loss = language_loss(sharded, every[rank()])
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses[rank()], rtol=rtol, atol=atol)
        assert_same_gradients(sharded, plain, rtol=rtol, atol=atol)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dtype == torch.float32:
            assert_same_parameters(sharded, plain, rtol=1e-3, atol=1e-4)  # AdamW turns rounding into up to lr
        with torch.no_grad():
            for mine, reference in zip(sharded.parameters(), plain.parameters(), strict=True):
                layout = getattr(mine, "layout", None)
                if isinstance(mine, gtp.GTPWeight):
                    mine.shard[layout.valid_slice].copy_(reference[layout.shard_slice])
                else:
                    mine.copy_(reference)
    stats = runtime.stats()
    assert stats.transport == transport
    torch.cuda.synchronize()
    return stats.hit_rate


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_train_as_data_parallelism(ranks, transport, name):
    for hit_rate in ranks(2).run(_train, transport, SCENARIOS[name]):
        assert hit_rate > 0.5


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_that_lags_changes_nothing(ranks, transport, dtype):
    ranks(2).run(_train, transport, {"delays": True, "dtype": dtype, "steps": 12})


def _train(transport, options):
    return train(transport, **options)

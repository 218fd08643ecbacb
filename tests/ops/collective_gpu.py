"""What the GPU tests of the collective GEMMs share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gtp.ops import GemmBackend, gemm_backend
from gtp.testing.ranks import rank

FUSED = ["symm_mem", "copy_engine"]
EVERY = ["collective", *FUSED]
SLEEP = 2_000_000  # cycles: about a millisecond, longer than any operation here


def device_of_rank() -> torch.device:
    device = torch.device("cuda", rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make(name: str) -> GemmBackend:
    return gemm_backend(name, dist.group.WORLD, device=device_of_rank())


def large(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16)

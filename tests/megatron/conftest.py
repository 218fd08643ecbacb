"""The ranks of this folder run Megatron on the CPU, inside `gtp.testing.megatron_cpu`, which is not for GPUs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def only_without_a_gpu(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and "ranks" in request.fixturenames and not request.node.get_closest_marker("gpu"):
        pytest.skip('runs Megatron on CPU ranks; hide the GPUs with CUDA_VISIBLE_DEVICES="" to run it here')

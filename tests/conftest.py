"""Fixtures of every test. Multi-rank tests take `ranks`; see gtp/testing/ranks.py for what a rank can do."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from gtp.testing.ranks import RankPools

# a property's time says how busy the machine is, not whether it holds
hypothesis.settings.register_profile("gtp", deadline=None)
hypothesis.settings.load_profile("gtp")
# references computed here must round as ranks do, and how a GEMM is cut over threads changes how it rounds
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world_size)` is a `RankPool` whose processes live across tests."""
    pools = RankPools()
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)

"""Fixtures of the GPU tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gtp.testing.ranks import RankPool, RankPools


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each, or one for both."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    pools = RankPools()
    yield pools(2)
    pools.close()

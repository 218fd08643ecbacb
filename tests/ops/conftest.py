"""Ranks that have a CUDA device each as far as there are some, and else share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gtp.testing.ranks import RankPool, RankPools


@contextmanager
def sharing_ranks() -> Iterator[RankPools]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    made = RankPools()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Of a file's tests."""
    with sharing_ranks() as made:
        yield made


@pytest.fixture(scope="module")
def pair(pools: RankPools) -> RankPool:
    return pools(2)


@pytest.fixture
def fresh_pools() -> Iterator[RankPools]:
    """Of one test: for what a process keeps, or does not survive."""
    with sharing_ranks() as made:
        yield made

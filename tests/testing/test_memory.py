"""The memory tools count storages, not tensors, and see what only autograd holds."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from gtp.testing.memory import live_bytes, live_full_storages, poisoned_memory, saved_tensors

# a size that nothing else in the process has
MIN_BYTES = 4 * 1_234_567


def big() -> torch.Tensor:
    return torch.zeros(1_234_567)


def test_views_are_one_storage_and_small_tensors_none() -> None:
    before = len(live_full_storages(MIN_BYTES))
    x = big()
    views = [x[1:], x.view(1, -1)]
    small = torch.zeros(10)
    found = live_full_storages(MIN_BYTES)
    assert len(found) == before + 1
    mine = next(s for s in found if s.nbytes == MIN_BYTES)
    assert set(mine.shapes) == {(1_234_567,), (1_234_566,), (1, 1_234_567)}
    assert mine.device == torch.device("cpu")
    del x, views, small
    assert len(live_full_storages(MIN_BYTES)) == before


def test_bytes_are_those_of_whole_storages() -> None:
    before = live_bytes(MIN_BYTES)
    x = big()[:5]
    assert live_bytes(MIN_BYTES) == before + MIN_BYTES
    del x
    assert live_bytes(MIN_BYTES) == before


def test_cycles_are_collected_before_counting() -> None:
    before = len(live_full_storages(MIN_BYTES))
    cycle: list[object] = [big()]
    cycle.append(cycle)
    del cycle
    assert len(live_full_storages(MIN_BYTES)) == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_meta_and_sparse_tensors_have_no_memory_to_count() -> None:
    before = live_bytes(1)
    tensors = [torch.empty(10_000_000, device="meta"), torch.sparse_coo_tensor(size=(3, 3))]
    assert live_bytes(1) - before < 1000
    del tensors


def test_tensors_that_only_autograd_holds_are_counted_while_the_graph_lives() -> None:
    before = len(live_full_storages(MIN_BYTES))
    leaf = torch.ones((), requires_grad=True)
    with saved_tensors() as saved:
        loss = (leaf * big()).exp().sum()
    # `exp` saves its output, the product saves `big()`: both are out of anybody's hands
    assert len(saved.storages(MIN_BYTES)) == 2
    assert len(live_full_storages(MIN_BYTES)) == before + 2
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 0.0
    assert saved.storages(MIN_BYTES) == []
    assert len(live_full_storages(MIN_BYTES)) == before


def test_counting_saved_tensors_makes_no_cycle() -> None:
    leaf = torch.ones((), requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with saved_tensors() as saved:
            out = (leaf * big()).exp()
        assert len(saved.storages(MIN_BYTES)) == 2
        del out
        assert saved.storages(MIN_BYTES) == []
    finally:
        gc.enable()


def test_poisoned_memory_is_nan_and_ends_with_the_block() -> None:
    with poisoned_memory():
        assert torch.empty(7).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
        # raw bytes, as buffer pools allocate them, are NaN in every float type
        raw = torch.empty(16, dtype=torch.uint8)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
            assert raw.view(dtype).float().isnan().all()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_poisoned_memory_is_put_back_after_an_error() -> None:
    with pytest.raises(KeyError), poisoned_memory():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_wrappers_count_by_what_they_hold() -> None:
    before = len(live_full_storages(MIN_BYTES))
    wrapper = TwoTensor(big(), big())
    with FakeTensorMode():
        fake = torch.empty(1_234_567)
    assert len(live_full_storages(MIN_BYTES)) == before + 2
    del wrapper, fake
    assert len(live_full_storages(MIN_BYTES)) == before

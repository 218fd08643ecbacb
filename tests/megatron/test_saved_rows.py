"""Where the rows of a shard lie in the tensor of a checkpoint, by value; and the functions that gtp stands before.

No process group. That files are right is shown with real ranks in test_checkpoints.py.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gtp
import gtp.megatron
from gtp.megatron.saved_rows import Placement, SavedRows
from gtp.megatron.surface import WRAPPED, Wrapped
from gtp.weights.layout import ShardLayout


def test_a_gated_fc1_reaches_into_both_halves():
    # 10 rows per TP rank, gate over up, in shards of 4: the second shard holds the last gate row and three up rows
    placement = Placement(ShardLayout((10, 3), 3, 1), 0, tp_rank=1, tp_size=2, stacked=("_w", "_v"))
    assert list(placement.parts()) == [
        ("", slice(0, 1), (5 + 4, 0), (20, 3)),
        ("", slice(1, 4), (10 + 5, 0), (20, 3)),
    ]


def test_halves_as_tensors_of_their_own():
    placement = Placement(ShardLayout((10, 3), 3, 1), 0, tp_rank=1, tp_size=2, stacked=("_w", "_v"), apart=True)
    assert list(placement.parts()) == [
        ("_w", slice(0, 1), (5 + 4, 0), (10, 3)),
        ("_v", slice(1, 4), (5, 0), (10, 3)),
    ]


def test_columns_split_by_tensor_parallelism_and_axes_in_front():
    placement = Placement(ShardLayout((6, 5), 2, 1), 1, tp_rank=2, tp_size=3, prepended=((1, 7, 8), (0, 1, 2)))
    assert list(placement.parts()) == [("", slice(0, 3), (1, 7, 3, 10), (2, 8, 6, 15))]


def test_a_shard_of_padding_has_no_part():
    assert list(Placement(ShardLayout((8, 2), 2, 1, alignment=8), 0, 0, 1).parts()) == []


@settings(deadline=None, max_examples=60)
@given(
    half=st.integers(1, 13),
    gtp_size=st.integers(1, 5),
    tp_size=st.integers(1, 3),
    alignment=st.integers(1, 9),
    gated=st.booleans(),
    apart=st.booleans(),
    tp_axis=st.sampled_from([0, 1]),
)
def test_all_ranks_together_write_the_unsharded_tensor(
    half: int, gtp_size: int, tp_size: int, alignment: int, gated: bool, apart: bool, tp_axis: int
):
    """And what a rank reads back is its shard, padding zero."""
    if gated and tp_axis == 1:
        return
    apart = apart and gated
    rows, columns = 2 * half, 3
    # what Megatron without gtp has in its TP ranks, and the file it writes from that
    local = [torch.arange(rows * columns).reshape(rows, columns) + 1000 * (t + 1) for t in range(tp_size)]
    halves = [torch.cat([w.chunk(2)[i] for w in local]) for i in range(2)]
    if gated:
        expected = {"k_w": halves[0], "k_v": halves[1]} if apart else {"k": torch.cat(halves)}
    else:
        expected = {"k": torch.cat(local, dim=tp_axis)}
    files: dict[str, torch.Tensor] = {}
    for t, g in itertools.product(range(tp_size), range(gtp_size)):
        layout = ShardLayout((rows, columns), gtp_size, g, alignment)
        shard = torch.zeros(layout.shard_shape, dtype=torch.int64)
        shard[layout.valid_slice] = local[t][layout.shard_slice]
        stacked = ("_w", "_v") if gated else ("",)
        placement = Placement(layout, tp_axis, t, tp_size, ((0, 1, 2),), stacked, apart=apart)
        built = SavedRows.of("k", shard, placement, 0).build()
        padding = built.pop("padding", None)
        assert (0 if padding is None else len(padding.unwrap())) == layout.shard_rows - layout.valid_rows
        loaded = {} if padding is None else {"padding": padding.unwrap()}
        for name, part in built.items():
            file = files.setdefault(part.key, torch.zeros(part.global_shape, dtype=torch.int64))
            target = file[tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.local_shape, strict=True))]
            assert not target.any(), "written twice"
            target.copy_(part.data)
            loaded[name] = target
        assert torch.equal(SavedRows.of("k", shard, placement, 0).merge_fn(loaded), shard)
    assert files.keys() == expected.keys()
    for key, file in files.items():
        assert not file[0].any()
        assert torch.equal(file[1], expected[key])


def test_slices_of_flattened_shards_are_refused():
    entry = SavedRows.of("k", torch.zeros(2, 2), Placement(ShardLayout((4, 2), 2, 0), 0, 0, 1), 0)
    entry.flattened_range = slice(0, 3)
    with pytest.raises(gtp.UnsupportedError, match=r'k: .*"fully_reshardable"'):
        entry.build()


def test_matrices_of_different_heights_as_tensors_of_their_own():
    # 3 + 1 + 2 rows per TP rank in shards of 2: the second shard holds the last row of the first and the second matrix
    layout = ShardLayout((6, 3), 3, 1)
    placement = Placement(layout, 0, tp_rank=1, tp_size=2, stacked=(".x", ".b", ".d"), heights=(3, 1, 2), apart=True)
    assert list(placement.parts()) == [
        (".x", slice(0, 1), (3 + 2, 0), (6, 3)),
        (".b", slice(1, 2), (1, 0), (2, 3)),
    ]
    together = dataclasses.replace(placement, apart=False)
    assert list(together.parts()) == [("", slice(0, 1), (5, 0), (12, 3)), ("", slice(1, 2), (6 + 1, 0), (12, 3))]


@functools.cache
def importers(name: str) -> dict[str, bool]:
    """Megatron's modules that import `name` from another one -> whether at import time."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    found = {}
    for path in root.rglob("*.py"):
        text = path.read_text()
        if name in text:
            top = {a.name for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) for a in n.names}
            if name in top:
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(["megatron.core", *parts]).removesuffix(".__init__")] = True
    return found


@pytest.mark.parametrize("entry", WRAPPED, ids=lambda entry: entry.name)
def test_every_copy_of_a_wrapped_function_is_in_the_table(entry: Wrapped):
    assert set(importers(entry.name)) == set(entry.copied_by)


def test_wrapped_functions_are_replaced_and_restored_in_every_module():
    modules = [(importlib.import_module(m), w.name) for w in WRAPPED for m in (w.module, *w.copied_by)]
    before = [getattr(module, name) for module, name in modules]
    late, name = modules[-1]
    gtp.megatron.install()
    try:
        for (module, attribute), original in zip(modules, before, strict=True):
            assert getattr(module, attribute).__wrapped__ is original, module
            assert getattr(module, attribute).__module__ == original.__module__  # functools.wraps
        # a module imported only now copies what it finds
        setattr(late, name, getattr(importlib.import_module(WRAPPED[-1].module), name))
    finally:
        gtp.megatron.uninstall()
    assert [getattr(module, name) for module, name in modules] == before


def test_plain_tensors_reach_megatron_unchanged():
    calls = []
    from gtp.megatron.checkpoint import WRAPPERS

    def original(*args: object, **options: object) -> str:
        calls.append((args, options))
        return "megatron's"

    for wrapper in WRAPPERS.values():
        assert wrapper(original)(torch.zeros(2), "key", allow_shape_mismatch=True) == "megatron's"
    assert [options for _, options in calls] == [{"allow_shape_mismatch": True}] * 2


def test_more_than_ten_runs_of_rows_are_put_together_in_their_order():
    """Mamba's in_proj has several; a tenth must not come before the second."""
    layout = ShardLayout((12, 1), 1, 0, 1)
    stacked = tuple(f"_{n}" for n in range(12))
    rows = torch.arange(12).view(12, 1)
    saved = SavedRows.of("k", rows, Placement(layout, None, 0, 1, (), stacked, (1,) * 12, True), 0)
    assert torch.equal(saved.merge_fn({name: part.data for name, part in saved.build().items()}), rows)

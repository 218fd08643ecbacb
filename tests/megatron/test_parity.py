"""Megatron-Core with the flag on under gtp, against Megatron-Core without it, at the same data.

Each cell of two tables trains a small model for five steps, on real gloo ranks, and compares losses and gradient norms
with those of Megatron without gtp. What differs is the order of additions, so a feature or a layout says which sum that
is; where neither names one, losses are equal bit for bit. docs/composition.md shows what was measured.

Models have two layers where layers have to do with each other, and one where the feature lies inside a layer or around
all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron.training import Case, Trained, train

# fp32 losses around 4.5: one unit in the last place is 4.8e-7. Gradients that are added in another order differ in
# their last bits, and Adam's steps carry that into the loss.
ORDER = 2e-6
# the norm adds squares in fp32 in an order that depends on how the parameters are cut
NORM = 2e-6


@dataclasses.dataclass(frozen=True)
class Row:
    """A feature of model or training.

    Attributes:
        options: Fields of `Case`.
        layouts: In which it is tested, names of columns.
        other_order: Which sum is added in another order than without gtp; empty: none.
    """

    options: dict[str, Any]
    layouts: tuple[str, ...]
    other_order: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A layout, with the same fields.

    Attributes:
        ranks: How many it takes.
    """

    ranks: int
    options: dict[str, Any]
    other_order: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A case, and by how much its losses may differ: nothing, where nothing is added in another order."""

    case: Case
    ranks: int
    bound: float


_ADAM: dict[str, Any] = {"distributed_optimizer": True}
_OVERLAPS: dict[str, Any] = {**_ADAM, "overlap_grad": True, "overlap_param": True, "bucket_size": 3000}

COLUMNS = {
    "GTP2": Column(2, {"gtp": 2}),
    "GTP4": Column(4, {"gtp": 4}, "four ranks' gradients"),
    "DP2 GTP2": Column(4, {"gtp": 2}, "over GTP first, then over replicas"),
    "TP2 GTP2": Column(4, {"tp": 2, "gtp": 2}),
    "TP2 GTP2 SP": Column(4, {"tp": 2, "gtp": 2, "sequence_parallel": True}, "norms' gradients over TP"),
    "CP2 GTP2": Column(4, {"cp": 2, "gtp": 2}, "over GTP first, then over CP"),
    "PP2 GTP2": Column(4, {"pp": 2, "gtp": 2, "microbatches": 4}, "over ranks first, then over microbatches"),
    "PP2 GTP2 interleaved": Column(
        4, {"pp": 2, "vpp": 2, "layers": 4, "gtp": 2, "microbatches": 4}, "over ranks first, then over microbatches"
    ),
}
ROWS = {
    "GPT, RMSNorm, SwiGLU": Row({}, tuple(COLUMNS)),
    "biases": Row({"bias": True, "layers": 1}, ("GTP2", "TP2 GTP2")),
    "GQA": Row({"gqa": True, "layers": 1}, ("GTP2", "TP2 GTP2", "CP2 GTP2")),
    "MLA": Row({"mla": True, "layers": 1}, ("GTP2", "DP2 GTP2", "TP2 GTP2")),
    "tied embeddings": Row(
        {"tied": True},
        ("GTP2", "GTP4", "TP2 GTP2", "TP2 GTP2 SP", "PP2 GTP2"),
        "over ranks first, then over both uses",
    ),
    "MTP": Row({"mtp": 1, "layers": 1}, ("GTP2", "TP2 GTP2"), "over ranks first, then over the output layer's uses"),
    "MTP, tied": Row({"mtp": 2, "tied": True, "layers": 1}, ("GTP2", "DP2 GTP2"), "over ranks first, then over uses"),
    "HybridModel: Mamba, attention, MLP": Row({"hybrid": "M*-"}, ("GTP2", "GTP4", "TP2 GTP2")),
    "recompute, full": Row({"recompute": "full"}, ("GTP2", "GTP4", "TP2 GTP2", "PP2 GTP2")),
    "recompute, selective": Row({"recompute": "selective"}, ("GTP2", "TP2 GTP2 SP")),
    "padding (alignment 16)": Row({"alignment": 16}, ("GTP2", "GTP4", "TP2 GTP2")),
    "gradient accumulation": Row({"microbatches": 3}, ("GTP2", "DP2 GTP2"), "over ranks first, then over microbatches"),
    "per-token loss": Row({"per_token": True}, ("GTP2", "DP2 GTP2", "CP2 GTP2", "PP2 GTP2")),
    "clipping": Row({"clip": 0.1, "layers": 1}, ("GTP2", "DP2 GTP2"), "the norm, whose last bit scales every gradient"),
    "bf16 weights, fp32 gradients": Row({"bf16": True, "grad_fp32": True, "layers": 1}, ("GTP2",)),
    "overlap_grad_reduce": Row({"overlap_grad": True}, ("GTP2", "DP2 GTP2", "PP2 GTP2 interleaved")),
    "DistributedOptimizer": Row(_ADAM, ("GTP2", "GTP4", "DP2 GTP2")),
    "DistributedOptimizer, both overlaps": Row(
        _OVERLAPS, ("GTP2", "DP2 GTP2", "CP2 GTP2", "PP2 GTP2", "PP2 GTP2 interleaved")
    ),
    # alignment 7: shards begin in the middle of a head
    "Muon": Row({"optimizer": "muon", "alignment": 7, "layers": 1}, ("GTP2", "GTP4", "TP2 GTP2")),
    "Muon, layer-wise": Row({"optimizer": "muon", "layer_wise": True, "bf16": True, "layers": 1}, ("GTP2",)),
}

_TOKENS = "tokens of all ranks in one wgrad, or in one per rank"
EXPERT_COLUMNS = {
    "GTP2 EGTP2": Column(2, {"gtp": 2, "egtp": 2}, _TOKENS),
    "EP2 GTP2": Column(4, {"ep": 2, "gtp": 2}, _TOKENS),
    "EP2 EGTP2": Column(4, {"ep": 2, "egtp": 2}, _TOKENS),
    "EP2 EGTP2 GTP2": Column(4, {"ep": 2, "egtp": 2, "gtp": 2}, _TOKENS),
    "TP2 GTP2 EP2 EGTP2 SP": Column(
        4, {"tp": 2, "gtp": 2, "ep": 2, "etp": 1, "egtp": 2, "sequence_parallel": True}, _TOKENS
    ),
}
EXPERT_ROWS = {
    "experts": Row({"experts": 4}, tuple(EXPERT_COLUMNS)),
    "experts and a shared one": Row(
        {"experts": 4, "shared_expert": True, "layers": 1}, ("GTP2 EGTP2", "EP2 EGTP2 GTP2")
    ),
    "experts, per-token loss": Row({"experts": 4, "per_token": True, "layers": 1}, ("GTP2 EGTP2", "EP2 EGTP2")),
    "experts, recompute, full": Row({"experts": 4, "recompute": "full"}, ("GTP2 EGTP2", "EP2 EGTP2 GTP2")),
    "experts, Muon": Row(
        {"experts": 4, "optimizer": "muon", "alignment": 7, "layers": 1}, ("GTP2 EGTP2", "EP2 EGTP2", "EP2 EGTP2 GTP2")
    ),
    "experts, DistributedOptimizer, both overlaps": Row({"experts": 4, **_OVERLAPS}, ("EP2 GTP2", "EP2 EGTP2")),
}


def cells(rows: dict[str, Row], columns: dict[str, Column]) -> dict[tuple[str, str], Cell]:
    """By name of row and column."""
    found = {}
    for name, row in rows.items():
        for layout in row.layouts:
            column = columns[layout]
            options = {**column.options, **row.options}
            bound = ORDER if row.other_order or column.other_order else 0.0
            found[name, layout] = Cell(Case(**options), column.ranks, bound)
    return found


CELLS = cells(ROWS, COLUMNS)
EXPERT_CELLS = cells(EXPERT_ROWS, EXPERT_COLUMNS)


class References:
    """What Megatron without gtp gives, trained once for all cells that compare with it.

    It trains without what changes when or where something is computed, sent or kept, and no number: the cells of these
    features show that they change none.
    """

    def __init__(self) -> None:
        self._trained: dict[tuple[int, Case], list[Trained]] = {}

    def of(self, run: Callable[..., list[Any]], cell: Cell) -> list[Trained]:
        """By rank."""
        case = dataclasses.replace(
            cell.case.unsharded(),
            alignment=1,
            recompute=None,
            distributed_optimizer=False,
            overlap_grad=False,
            overlap_param=False,
            bucket_size=None,
        )
        key = cell.ranks, case
        if key not in self._trained:
            self._trained[key] = run(train, case, timeout=120)
        return self._trained[key]


def measured(run: Callable[..., list[Any]], cell: Cell, references: References) -> tuple[float, float]:
    """The largest differences of a loss and of a gradient norm (relative), which are within their bounds."""
    results = list(zip(references.of(run, cell), run(train, cell.case, timeout=120), strict=True))
    last = results[-1]  # the last rank is on the last pipeline stage
    norms = []
    for plain, sharded in (last, results[0]):
        assert sharded.sharded
        assert not plain.sharded
        assert all(math.isfinite(norm) and norm > 0 for norm in plain.norms)
        norms += [abs(after - before) / before for before, after in zip(plain.norms, sharded.norms, strict=True)]
    plain, sharded = last
    assert plain.losses[-1] != plain.losses[0]
    losses = [abs(after - before) for before, after in zip(plain.losses, sharded.losses, strict=True)]
    assert max(losses) <= cell.bound
    assert max(norms) <= norm_bound(cell)
    return max(losses), max(norms)


def norm_bound(cell: Cell) -> float:
    """What `measured` allows a norm to differ by, relative to it."""
    return max(NORM, 2 * cell.bound)


@pytest.fixture(scope="module")
def references() -> References:
    return References()


def check(ranks: Any, cell: Cell, references: References) -> None:
    if cell.case.optimizer == "muon":
        pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs the package emerging-optimizers")
    loss, _ = measured(ranks(cell.ranks).run, cell, references)
    assert loss <= cell.bound


# by size of the rank pool, so that none is started twice
def _by_ranks(table: dict[tuple[str, str], Cell]) -> list[tuple[str, str]]:
    return sorted(table, key=lambda key: table[key].ranks)


@pytest.mark.parametrize("row, column", _by_ranks(CELLS))
def test_losses_and_norms_are_those_without_gtp(ranks: Any, references: References, row: str, column: str):
    """C11: tied embeddings. C13, C15: MTP. C16, C18: padding, Muon's sizes and all norms. C21: every layout. C23:
    per-token loss. C44: recompute; C46: with PP2, two forwards of a recomputed block before the first backward.
    """
    check(ranks, CELLS[row, column], references)


@pytest.mark.parametrize("row, column", _by_ranks(EXPERT_CELLS))
def test_with_experts_too(ranks: Any, references: References, row: str, column: str):
    """C84: experts over ranks."""
    check(ranks, EXPERT_CELLS[row, column], references)

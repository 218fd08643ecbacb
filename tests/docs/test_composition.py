# ruff: noqa: E501  a page has long lines
"""docs/composition.md shows what the tests measure: its Megatron tables are the cells of test_parity.py.

`python -m tests.docs.test_composition` runs every cell, checks it as the tests do, and rewrites the page.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from gtp.testing.ranks import RankPools
from tests.megatron.test_parity import (
    CELLS,
    COLUMNS,
    EXPERT_CELLS,
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    NORM,
    ORDER,
    ROWS,
    Cell,
    Column,
    References,
    Row,
    measured,
    norm_bound,
)
from tests.ops import collective_cells

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

type Values = dict[tuple[str, str], tuple[str, str]]
"""By row and column: the largest difference of a loss and of a gradient norm, as printed."""

HEAD = """# What composes with what

Every line is a test; what is not here has none, and what cannot work is refused by one.

## Megatron-Core with the flag on, under gtp, against Megatron-Core without it

Five steps of a small model on CPU ranks (gloo), same seed and data. A cell holds the largest difference measured over the
steps: of a loss, absolute, and after the stroke of the gradient norm, relative. **0** is equal bit for bit because nothing is
added in another order, and the tests allow nothing else. Elsewhere sums over ranks, microbatches or uses are added in another
order: losses, around 4.5, may then differ by {order:.0e} (one unit in the last place is 4.8e-07), norms by {norms:.0e}
(by {norm:.0e} where losses are equal: their squares are added in another order). A dot: not tested. Written by
`python -m tests.docs.test_composition` from the cells of `tests/megatron/test_parity.py`.

Recomputation, padding, overlaps and the DistributedOptimizer change when or where something happens, and no number: their
rows are compared with Megatron without them.

TP tensor, SP sequence, CP context, PP pipeline (1F1B), EP expert parallel, DP replicas, EGTP the experts' own GTP axis.
"""

COLLECTIVE_HEAD = """
## Collective GEMMs of tensor parallelism

Per `tp_gemm_backend`: a test shows that it works, or that it is **refused** with an error. A dot: no test. Those of `symm_mem`
and `copy_engine` need a GPU, which ranks may share. From `tests/ops/collective_cells.py`.

"""

REST = """
## Plain PyTorch

| what | test |
|---|---|
| five AdamW steps bit-equal to data parallelism at 2 ranks (fp32): plain, both checkpointings, accumulation, frozen half, random branch, evaluation between, `keep_bytes`, no prefetch, alignment | `tests/weights/test_shard_model.py` |
| the same at 4 ranks, and tied weights, repeated layers, `no_sync`: within fp32 rounding (1e-5 relative after five AdamW steps) | `tests/weights/test_shard_model.py` |
| exceptions in forward and in backward, then right steps | `tests/weights/test_shard_model.py` |
| `torch.autograd.grad` with respect to sharded weights | `tests/weights/test_autograd_grad.py` |
| `unshard=`: convolutions, `addmm`, experts in one tensor, attention, parameter lists; checkpointing, hooks, frozen, tied, compile | `tests/weights/test_unshard.py`, `test_lines_hugging_face.py` |
| DCP checkpoints over 4, 3, 2 and 1 ranks and the plain model; bit-exact resumption | `tests/checkpoint/` |
| Muon equal to the unsharded one | `tests/optim/test_muon.py` |
| whole steps in a CUDA graph, one rank late (GPU) | `tests/runtime/test_copy_engine_training.py`, `tests/weights/test_gpu_training.py` |
| layers graphed one by one: checkpointing, repeated use, compute copies, accumulation, hooks (GPU, and what is captured on CPU) | `tests/weights/test_graphed_gpu.py`, `tests/weights/test_graphed.py` |

## Refused, each by a test

Double backward; indexing, arithmetic and other functions that need the full weight, outside of what `unshard=` names;
tracing (`make_fx`, `torch.export`, `torch.jit`), transforms of `torch.func`, nested inputs; `deepcopy`, pickling;
`load_state_dict` with `assign=True`; `register_hook` on a sharded weight; sharding twice; DistributedDataParallel around it;
DTensor and FSDP parameters. Under Megatron's flag: what [megatron.md](megatron.md) lists, setting by setting.
"""


def table(rows: dict[str, Row], columns: dict[str, Column], cells: dict[tuple[str, str], Cell], values: Values) -> str:
    """One line per feature, one column per layout."""
    lines = ["| |" + "|".join(columns) + "|", "|---" * (len(columns) + 1) + "|"]
    for name in rows:
        shown = [_shown(cells.get((name, column)), values.get((name, column))) for column in columns]
        lines.append(f"| {name} |" + "|".join(shown) + "|")
    return "\n" + "\n".join(lines) + "\n"


def _shown(cell: Cell | None, value: tuple[str, str] | None) -> str:
    if cell is None or value is None:
        return "·"
    loss, norm = value
    return f"{loss if cell.bound else f'**{loss}**'} / {norm}"


def collective_table() -> str:
    """One line per feature, one column per backend of the collective GEMMs."""
    lines = ["| |" + "|".join(collective_cells.BACKENDS) + "|", "|---" * (len(collective_cells.BACKENDS) + 1) + "|"]
    for feature, cells in collective_cells.CELLS.items():
        shown = [
            "·" if cell is None else f"{'**refused**: ' if cell.refused else ''}`{cell.test}`"
            for cell in cells.values()
        ]
        lines.append(f"| {feature} |" + "|".join(shown) + "|")
    return "\n".join(lines) + "\n"


def page(values: Values) -> str:
    return (
        HEAD.format(order=ORDER, norm=NORM, norms=2 * ORDER)
        + table(ROWS, COLUMNS, CELLS, values)
        + table(EXPERT_ROWS, EXPERT_COLUMNS, EXPERT_CELLS, values)
        + COLLECTIVE_HEAD
        + collective_table()
        + REST
    )


def values_on(text: str) -> Values:
    """What a page says was measured."""
    found: Values = {}
    columns: list[str] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if line.startswith("| |"):
            columns = parts[1:]
        for column, part in zip(columns, parts[1:], strict=False):
            if value := re.fullmatch(r"\**([\d.e+-]+)\** / ([\d.e+-]+)", part):
                found[parts[0], column] = (value[1], value[2])
    return found


def test_the_page_shows_every_cell_within_what_the_tests_allow():
    text = PAGE.read_text()
    values = values_on(text)
    cells = CELLS | EXPERT_CELLS
    assert values.keys() == cells.keys(), "run python -m tests.docs.test_composition"
    for key, cell in cells.items():
        loss, norm = map(float, values[key])
        assert loss <= cell.bound, key
        assert norm <= norm_bound(cell), key
    # and nothing else on the page was written by hand
    assert text == page(values), "run python -m tests.docs.test_composition"


def test_every_collective_gemm_cell_names_a_test_of_its_backend():
    for feature, cells in collective_cells.CELLS.items():
        for backend, cell in cells.items():
            if cell is None:
                continue
            text = (PAGE.parents[1] / cell.file).read_text()
            assert f"\ndef {cell.test}(" in text, (feature, backend)
            # the fused backends run on a GPU only: elsewhere they can be refused, or meet one rank
            on_gpu = cell.file in (collective_cells.GPU, collective_cells.VALUES)
            assert on_gpu or backend == "collective" or cell.refused or feature == "TP 1"


def measure_all() -> Values:
    """Runs every cell. Minutes."""
    pools, references, values = RankPools(), References(), {}
    start = time.monotonic()
    try:
        for key, cell in sorted((CELLS | EXPERT_CELLS).items(), key=lambda item: item[1].ranks):
            loss, norm = measured(pools(cell.ranks).run, cell, references)
            values[key] = (_number(loss), _number(norm))
            print(f"{time.monotonic() - start:5.0f} s  {key}: {values[key]}", flush=True)
    finally:
        pools.close()
    return values


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


if __name__ == "__main__":
    PAGE.write_text(page(measure_all()))

# ruff: noqa: E501  a page has long lines
"""docs/composition.md is what the tests hold: its Megatron tables are made from the cases of test_parity.py.

`python -m tests.docs.test_composition` rewrites the page.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.megatron.test_parity import FOUR, NORM, TWO
from tests.megatron.training import Case

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

HEAD = """# What composes with what

Every line is a test; what is not here has none, and what cannot work is refused by one.

## Megatron-Core with the flag on, under gtp, against Megatron-Core without it

Five steps of a small GPT on CPU ranks (gloo), same seed and data: the largest difference of a loss that the test allows.
0 means equal bit for bit: additions happen in the same order. Elsewhere sums over ranks, microbatches or uses are added in
another order, and the bound is {order:.0e} on losses around 4.5, where one unit in the last place is 4.8e-07. Gradient norms
agree within {norm:.0e} relative. Made from `tests/megatron/test_parity.py` by `tests/docs/test_composition.py`.
"""

REST = """
## Plain PyTorch

| what | test |
|---|---|
| five AdamW steps bit-equal to data parallelism at 2 ranks (fp32): plain, both checkpointings, accumulation, frozen half, random branch, evaluation between, `keep_bytes`, no prefetch, alignment | `tests/weights/test_shard_model.py` |
| the same at 4 ranks, and tied weights, repeated layers, `no_sync`: within fp32 rounding (1e-5 relative after five AdamW steps) | `tests/weights/test_shard_model.py` |
| exceptions in forward and in backward, then right steps | `tests/weights/test_shard_model.py` |
| `torch.autograd.grad` with respect to sharded weights | `tests/weights/test_autograd_grad.py` |
| DCP checkpoints over 4, 3, 2 and 1 ranks and the plain model; bit-exact resumption | `tests/checkpoint/` |
| Muon equal to the unsharded one | `tests/optim/test_muon.py` |
| collective GEMMs and TP blocks at 2 and 4 ranks, TP x GTP | `tests/ops/test_collective_linear.py`, `tests/modules/test_tensor_parallel.py` |
| whole steps in a CUDA graph, layers graphed one by one, one rank late (GPU) | `tests/runtime/test_copy_engine.py`, `tests/weights/test_gpu_training.py` |

## Refused, each by a test

Double backward; indexing, arithmetic and other functions that need the full weight; `deepcopy`, pickling; `load_state_dict`
with `assign=True`; `register_hook` on a sharded weight; sharding twice; DTensor and FSDP parameters; under Megatron's flag:
FP8, CUDA graphs, `average_in_collective`, several distributed-optimizer instances, shards that tensor parallelism does not
divide (`tests/megatron/test_refusals.py`).
"""


def table(title: str, cases: dict[str, tuple[Case, float]]) -> str:
    """One row per case: what differs from a plain two-layer GPT, and the bound."""
    lines = [f"\n### {title}\n", "| case | settings | losses differ by at most |", "|---|---|---|"]
    for name, (case, bound) in cases.items():
        settings = ", ".join(
            f"{field.name}={getattr(case, field.name)}"
            for field in dataclasses.fields(case)
            if getattr(case, field.name) != getattr(Case(), field.name)
        )
        lines.append(f"| {name} | {settings} | {bound:.0e} |" if bound else f"| {name} | {settings} | 0 |")
    return "\n".join(lines) + "\n"


def page() -> str:
    return HEAD.format(order=2e-6, norm=NORM) + table("2 ranks", TWO) + table("4 ranks", FOUR) + REST


def test_the_page_is_what_the_tests_hold():
    assert PAGE.read_text() == page(), "run python -m tests.docs.test_composition"


if __name__ == "__main__":
    PAGE.write_text(page())

"""What composes with the collective GEMMs, backend by backend: the test that shows it, or the one that refuses it.

`tests/docs/test_composition.py` makes a table of docs/composition.md of these, and checks that every test exists.
"""

from __future__ import annotations

import dataclasses

OPS, VALUES = "tests/ops/test_collective_linear.py", "tests/ops/test_collective_gpu.py"
GPU = "tests/ops/test_collective_gpu_compositions.py"
BLOCKS, AROUND = "tests/modules/test_tensor_parallel.py", "tests/modules/test_tensor_parallel_compositions.py"
WEIGHTS = "tests/modules/test_tensor_parallel_gtp.py"

BACKENDS = ("collective", "symm_mem", "copy_engine")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A cell: a test's file and function, and whether it shows that the composition works or that it is refused."""

    file: str
    test: str
    refused: bool = False


def each(collective: Shown | None, symm_mem: Shown | None, copy_engine: Shown | None) -> dict[str, Shown | None]:
    return dict(zip(BACKENDS, (collective, symm_mem, copy_engine), strict=True))


def both(test: str, file: str = GPU) -> tuple[Shown, Shown]:
    """One GPU test over both fused backends."""
    return Shown(file, test), Shown(file, test)


_REFUSED = Shown(BLOCKS, "test_what_cannot_be_served_is_refused_when_built", refused=True)
_EXACT = Shown(OPS, "test_exact_values_match_the_whole_layer")

CELLS: dict[str, dict[str, Shown | None]] = {
    "sequence parallel": each(_EXACT, *both("test_exact_values_match_the_whole_layer", VALUES)),
    "sequence parallel off": each(_REFUSED, _REFUSED, _REFUSED),
    "bias, column-parallel": each(_EXACT, _REFUSED, Shown(VALUES, "test_exact_values_match_the_whole_layer")),
    "batch > 1": each(_EXACT, *both("test_exact_values_match_the_whole_layer", VALUES)),
    "GTP weights": each(
        Shown(WEIGHTS, "test_tp_times_gtp_is_tp_on_both_ranks_data"), *both("test_tp_times_gtp")
    ),
    "activation checkpointing": each(
        Shown(AROUND, "test_activation_checkpointing"), *both("test_activation_checkpointing")
    ),
    "torch.compile": each(
        Shown(AROUND, "test_compiled_blocks_are_eager_ones_and_settle"), *both("test_compiled_block")
    ),
    "CUDA graphs": each(None, *both("test_graphs_replay_and_survive_growth")),
    "CUDA graphs, captured too large": each(None, *(
        dataclasses.replace(shown, refused=True) for shown in both("test_a_capture_that_would_grow_the_workspace")
    )),
    "FSDP2 outside": each(Shown(AROUND, "test_fsdp2_outside"), None, None),
    "ten steps of a Llama against fp64": each(
        Shown(WEIGHTS, "test_ten_steps_of_a_llama_at_tp_2"), *both("test_ten_steps_of_a_llama_by_every_backend")
    ),
    "TP 1": each(*[Shown(BLOCKS, "test_one_rank_runs_the_stock_path_and_says_so_once")] * 3),
    "no peer memory": each(
        Shown(OPS, "test_auto_says_what_it_took"),
        *[Shown(OPS, "test_c79_no_fast_path_on_the_cpu", refused=True)] * 2,
    ),
}  # fmt: skip

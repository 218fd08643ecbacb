"""The Megatron benchmark on CPU ranks: its files say what they must, and a variant leaves nothing to the next."""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import pytest
import torch

from benchmarks import megatron_gpt
from gtp.runtime.runtime import GTPRuntime
from gtp.testing.megatron_cpu import megatron_on_cpu
from gtp.weights.parameter import GTPWeight
from tests.processes import Ended


def living() -> dict[str, int]:
    """How many models, runtimes and sharded weights this process holds."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    megatron_gpt.settle(torch.device("cpu"))
    # asking a half-dead object for its class may raise
    found = [type(thing) for thing in gc.get_objects()]
    return {kind.__name__: sum(issubclass(f, kind) for f in found) for kind in (GTPRuntime, GTPWeight, GPTModel)}


def left_by_a_variant() -> tuple[dict[str, int], dict[str, int], list[float]]:
    """Objects that live before a variant is built, trained, timed and taken down as the benchmark does, and after."""
    args = argparse.Namespace(tiny=True, quick=True, steps=0, losses=2, iterations=1, transport="auto")
    with megatron_on_cpu():
        before = living()  # earlier tests: Megatron's own models with experts outlive their last reference
        result = megatron_gpt.measure("gtp", "local", 16, torch.device("cpu"), args)
        return before, living(), result["losses"]


@pytest.mark.timeout(200)
def test_a_variant_leaves_nothing_to_the_next(ranks: Any):
    for before, after, losses in ranks(2).run(left_by_a_variant, timeout=180):  # it imports Megatron
        assert len(losses) == 2
        assert after == before


@pytest.mark.process(
    "-m", "benchmarks.megatron_gpt", "--device", "cpu", "--tiny", "--steps", "12", "--out", "{folder}/curves.json"
)
def test_loss_curves_of_all_variants_lie_over_each_other(process: Ended):
    out = process.folder / "curves.json"
    result = json.loads(out.read_text())
    assert result["command"].startswith("python -m benchmarks.megatron_gpt --device cpu --tiny --steps 12")
    losses = result["losses"]
    assert set(losses) == {"unsharded", "gtp"}
    assert len(losses["gtp"]) == 12
    assert losses["gtp"][-1] < losses["gtp"][0] - 0.05
    # clipping scales every gradient by a norm whose squares are added in another order
    assert max(abs(a - b) for a, b in zip(losses["gtp"], losses["unsharded"], strict=True)) <= 1e-5
    assert {row["impl"]: row["loss_gap"] <= 1e-5 for row in result["rows"]} == {"unsharded": True, "gtp": True}
    assert out.with_suffix(".png").stat().st_size > 1000

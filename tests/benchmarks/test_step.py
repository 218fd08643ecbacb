"""The step benchmark runs on CPU ranks, and its file says what it must."""

from __future__ import annotations

import json

import pytest

from tests.processes import Ended


@pytest.mark.process(
    "-m",
    "benchmarks.step",
    "--device",
    "cpu",
    "--tiny",
    "--quick",
    "--cases",
    "llama 32",
    "--out",
    "{folder}/step.json",
)
def test_it_runs_on_the_cpu(process: Ended) -> None:
    result = json.loads((process.folder / "step.json").read_text())
    assert result["benchmark"] == "step"
    assert result["command"].startswith("python -m benchmarks.step --device cpu --tiny")
    assert result["environment"]["ranks"] == 2
    assert result["skipped"]["gtp copy_engine"] == "the CPU has no copy engines"
    rows = {row["impl"]: row for row in result["rows"]}
    assert set(rows) == {"unsharded", "gtp process_group", "fsdp2 per block", "fsdp2 per linear"}
    assert rows["unsharded"]["ratio"] == 1.0
    ours = rows["gtp process_group"]
    assert ours["ms_min"] <= ours["ms"] <= ours["ms_max"]
    # Three roundings to five digits each.
    assert ours["ratio"] == pytest.approx(rows["unsharded"]["ms"] / ours["ms"], rel=3e-4)
    # 2 layers of 128 x 64, 64 x 64, 192 x 64 and 64 x 96 in fp32; half of each comes by wire. Gathered once or twice,
    # since what forward used last may still be there when backward begins, and reduced once.
    weights = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) * 4
    assert 2 * weights / 2 / 1e6 < ours["wire_mb"] <= 3 * weights / 2 / 1e6 + 0.05

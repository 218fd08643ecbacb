"""The step benchmark runs on CPU ranks, and its file says what it must."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.timeout(200)
def test_it_runs_on_the_cpu(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "step.json"
    command = [sys.executable, "-m", "benchmarks.step", "--device", "cpu", "--tiny", "--quick", "--cases", "llama 32"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["benchmark"] == "step"
    assert result["command"].startswith("python -m benchmarks.step --device cpu --tiny")
    assert result["environment"]["ranks"] == 2
    assert result["skipped"]["gtp copy_engine"] == "the CPU has no copy engines"
    rows = {row["impl"]: row for row in result["rows"]}
    assert set(rows) == {"unsharded", "gtp process_group", "fsdp2 per block", "fsdp2 per linear"}
    assert rows["unsharded"]["ratio"] == 1.0
    ours = rows["gtp process_group"]
    assert ours["ms_min"] <= ours["ms"] <= ours["ms_max"]
    assert ours["ratio"] == pytest.approx(rows["unsharded"]["ms"] / ours["ms"], rel=1e-3)
    # 2 layers of 128 x 64, 64 x 64, 192 x 64 and 64 x 96 in fp32; half of each comes by wire. Gathered once or twice,
    # since what forward used last may still be there when backward begins, and reduced once.
    weights = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) * 4
    assert 2 * weights / 2 / 1e6 < ours["wire_mb"] <= 3 * weights / 2 / 1e6 + 0.05

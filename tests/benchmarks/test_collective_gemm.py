"""The collective-GEMM benchmark runs on CPU ranks, and its file says what it must."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.timeout(200)
def test_it_runs_on_the_cpu(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "collective_gemm.json"
    command = [sys.executable, "-m", "benchmarks.collective_gemm", "--device", "cpu", "--tiny", "--quick"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["benchmark"] == "collective_gemm"
    assert result["command"].startswith("python -m benchmarks.collective_gemm --device cpu --tiny")
    rows = result["rows"]
    assert [(row["case"], row["mode"], row["impl"]) for row in rows] == [
        (f"tiny, {op}", mode, impl)
        for op in ("all-gather", "reduce-scatter")
        for mode in ("forward", "forward and backward")
        for impl in ("gemm", "unfused")
    ]
    for alone, unfused in zip(rows[::2], rows[1::2], strict=True):
        assert alone["ratio"] == 1.0
        assert unfused["ratio"] == pytest.approx(alone["ms"] / unfused["ms"], rel=1e-3)
        assert unfused["speedup_over_unfused"] == 1.0

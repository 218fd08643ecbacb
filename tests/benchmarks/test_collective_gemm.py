"""The collective-GEMM benchmark runs on CPU ranks, and its file says what it must."""

from __future__ import annotations

import json

import pytest

from benchmarks.collective_breakdown import breakdown
from benchmarks.collective_gemm import page
from benchmarks.overlap import Event
from tests.processes import Ended


@pytest.mark.process(
    "-m", "benchmarks.collective_gemm", "--device", "cpu", "--tiny", "--quick", "--out", "{folder}/collective_gemm.json"
)
def test_it_runs_on_the_cpu(process: Ended) -> None:
    result = json.loads((process.folder / "collective_gemm.json").read_text())
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
        # Three roundings to five digits each.
        assert unfused["ratio"] == pytest.approx(alone["ms"] / unfused["ms"], rel=3e-4)
        assert unfused["speedup_over_unfused"] == 1.0


def made_up_row(mode: str, impl: str, ms: float, alone: float) -> dict[str, object]:
    return {"case": "a case", "mode": mode, "impl": impl, "ms": ms, "ms_min": ms - 0.1, "ms_max": ms + 0.1} | {
        "ratio": alone / ms
    }


def test_the_page_shows_ratios_and_the_spread() -> None:
    modes = ["forward", "forward, graph", "forward and backward", "forward and backward, graph"]
    rows = [
        made_up_row(mode, impl, ms, 1.0 + number)
        for number, mode in enumerate(modes)
        for impl, ms in (("gemm", 1.0 + number), ("unfused", 2.0), ("symm_mem", 4.0), ("copy_engine", 5.0))
    ]
    lines = page({"rows": rows}).splitlines()
    assert len(lines) == 2 + len(modes)
    assert lines[2] == "| a case | forward | 1.000 | 0.50 | 0.25 | 0.20 | 5.000 (4.900 to 5.100) |"
    assert lines[5].startswith("| a case | forward and backward, graph | 4.000 | 2.00 | 1.00 | 0.80 |")


def test_the_breakdown_counts_per_operation() -> None:
    """Four operations of a trace: each a GEMM of 100 us with a copy of 40 us under it, and 10 us of nothing after."""
    events = []
    for start in range(0, 440, 110):
        events.append(Event("compute", "gemm", 7, start, start + 100.0))
        events.append(Event("copy", "Memcpy PtoP", 8, start + 10.0, start + 50.0))
    row = breakdown([sorted(events, key=lambda e: e.start)])
    assert (row["compute_ms"], row["copy_ms"], row["copy_exposed_ms"]) == (0.1, 0.04, 0.0)
    assert row["idle_ms"] == pytest.approx(0.0075)  # three gaps, over four operations
    assert row["kernels"] == {"gemm": {"per_op": 1.0, "us": 100.0}, "Memcpy PtoP": {"per_op": 1.0, "us": 40.0}}
    assert row["timeline"][0].endswith("stream   7  gemm")

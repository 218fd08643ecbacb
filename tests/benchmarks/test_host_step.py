"""The benchmark of an eager step's host time runs on CPU ranks, and its file says what it must."""

from __future__ import annotations

import json

import pytest

from tests.processes import Ended


@pytest.mark.process(
    "-m", "benchmarks.host_step", "--device", "cpu", "--tiny", "--quick", "--tokens", "8", "--out", "{folder}/host.json"
)
def test_it_runs_on_the_cpu(process: Ended) -> None:
    result = json.loads((process.folder / "host.json").read_text())
    assert result["benchmark"] == "host_step"
    rows = {row["impl"]: row for row in result["rows"]}
    assert list(rows) == ["unsharded", "functions", "gtp, no wire", "gtp"]
    for row in rows.values():
        assert 0 < row["host_ms_min"] <= row["host_ms"] <= row["host_ms_max"]
        assert row["linears"] == 8
    assert "driver" not in rows["gtp"]  # the CPU has none

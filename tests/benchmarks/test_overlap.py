"""The arithmetic behind the overlap figures, on traces made by hand."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.overlap import Event, account, common_part, events_of, picture, union


def trace(*events: tuple[str, str, int, float, float]) -> dict[str, object]:
    return {
        "traceEvents": [
            {"name": name, "cat": category, "ts": start, "dur": duration, "args": {"stream": stream}}
            for name, category, stream, start, duration in events
        ]
    }


STEP = trace(
    ("gemm", "kernel", 7, 0, 1000),
    ("gemm", "kernel", 7, 1500, 500),
    ("Memcpy PtoP", "gpu_memcpy", 20, 200, 400),  # all beside the first GEMM
    ("Memcpy PtoP", "gpu_memcpy", 21, 900, 400),  # a quarter of it
    ("fused_add_kernel", "kernel", 22, 1900, 300),  # a third beside the second
    ("Memcpy DtoD", "gpu_memcpy", 7, 1100, 100),  # exposed but for the copy between GPUs, which hides nothing
    ("memcpy128", "kernel", 23, 900, 200),  # half of it beside the first GEMM
    ("cudaLaunchKernel", "cuda_runtime", 1, 0, 5000),  # the host's, no matter
)


def test_each_kind_is_split_into_hidden_and_exposed() -> None:
    result = account(events_of(STEP))
    assert result["compute_ms"] == pytest.approx(1.5)
    assert (result["copy_ms"], result["copy_hidden_ms"], result["copy_exposed_ms"]) == (0.8, 0.5, 0.3)
    assert result["copy_hidden_share"] == pytest.approx(0.625)
    local = [result[f"local_copy_{what}"] for what in ("ms", "hidden_ms", "exposed_ms")]
    assert local == pytest.approx([0.3, 0.1, 0.2])
    assert (result["addition_ms"], result["addition_hidden_ms"]) == (0.3, 0.1)
    assert result["step_ms"] == pytest.approx(2.2)
    assert result["not_compute_ms"] == pytest.approx(0.7)
    assert result["idle_ms"] == pytest.approx(0.2)


def test_spans_merge_and_intersect() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (3.5, 5)]) == [(0, 2), (3, 5)]
    assert common_part([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == [(1, 2), (3, 4), (4.5, 5)]


def test_the_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture(events_of(STEP), tmp_path / "step.png", "a step")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert Event("copy", "x", 1, 0.0, 1.0) == Event("copy", "x", 1, 0.0, 1.0)

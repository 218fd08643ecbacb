"""The demo, small: it trains twice, compares, plots, and fails when it should."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Ended

ROOT = Path(__file__).parents[2]


@pytest.mark.process(
    "examples/pretrain_gpt.py",
    "--steps",
    "30",
    "--sizes",
    "layers=2,hidden=64,heads=4,seq=64,batch=4,lr=0.004",
    "--out",
    "{folder}",
    ranks=2,
)
def test_the_demo_passes_and_leaves_its_plots(process: Ended):
    assert "PASSED" in process.stdout
    lines = [line.split() for line in process.stdout.splitlines()]
    losses = [line for line in lines if len(line) == 4 and line[0].isdigit()]
    assert losses[-1][0] == "29"
    assert all(line[1] == line[2] and line[3] == "0" for line in losses)
    for name in ("weights", "gradients"):
        (row,) = (line for line in lines if line[:3] == [name, "per", "rank"])
        assert 0.5 <= float(row[-1]) < 0.51
    for plot in ("loss.png", "memory.png", "schedule.png"):
        assert (process.folder / plot).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("gpt_demo.report"), importlib.import_module("gpt_demo.settings")


def results(demo: Any, difference: float, held_out_bits: float) -> tuple[Any, Any, Any]:
    report, settings = demo
    plain = report.Result(
        layout=settings.Layout("unsharded", 1, 1), losses=[5.5, 3.0], held_out_bits=held_out_bits, bytes_weights=8,
        bytes_grads=8, bytes_optimizer=16, bytes_buffers=0, tokens_per_second=1.0, stats=None, timeline=[],
    )  # fmt: skip
    sharded = dataclasses.replace(plain, layout=settings.Layout("GTP=2", 1, 2), losses=[5.5, 3.0 + difference])
    return report, plain, sharded


def test_any_difference_fails_in_fp32_on_two_ranks(demo: Any):
    options = demo[1].Options(steps=2, seed=0)
    report, plain, sharded = results(demo, difference=2.4e-7, held_out_bits=4.0)
    (problem,) = report.verdict(plain, sharded, options)
    assert "losses differ by 8e-08" in problem
    assert report.verdict(plain, plain, options) == []
    assert report.verdict(plain, sharded, dataclasses.replace(options, bf16=True)) == []


def test_a_model_that_did_not_learn_fails(demo: Any):
    options = demo[1].Options(steps=2, seed=0)
    report, plain, sharded = results(demo, difference=0.0, held_out_bits=5.5)
    (problem,) = report.verdict(plain, sharded, options)
    # 65% of 5.5 nats, 7.93 bits, is 5.16 bits
    assert "5.500 bits per byte is not below 65% of the first loss 7.935" in problem


def test_batches_depend_on_step_rank_and_seed_alone(demo: Any, tmp_path: Path):
    data = importlib.import_module("gpt_demo.data")
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 40)
    corpus = data.load(tmp_path / "text.txt", seq=16)
    first = corpus.batch(step=3, data_rank=1, batch=4, seq=16, seed=5)
    assert first.shape == (4, 17)
    assert first.equal(corpus.batch(step=3, data_rank=1, batch=4, seq=16, seed=5))
    for other in ({"step": 4}, {"data_rank": 0}, {"seed": 6}):
        arguments = {"step": 3, "data_rank": 1, "seed": 5} | other
        assert not first.equal(corpus.batch(batch=4, seq=16, **arguments))
    assert len(corpus.train) + len(corpus.held_out) == 256 * 40
    with pytest.raises(SystemExit, match="too little text"):
        data.load(tmp_path / "text.txt", seq=1000)

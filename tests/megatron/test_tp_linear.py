"""`install(tp_gemm_backend=...)`: Megatron's parallel linears by collective GEMMs, against Megatron's own, same data.

On CPU ranks, so with the backend "collective"; `tests/ops/test_collective_gpu.py` shows that others give its numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gtp
import gtp.megatron
from gtp.errors import GTPStateError, GTPValueError, UnsupportedError
from gtp.testing.collectives import collective_log
from tests.megatron.test_parity import NORM, ORDER
from tests.megatron.training import BATCH, SEQ, Case, Job, environment, model_config, train

TWO = {
    "plain": (Case(tp=2, sequence_parallel=True), 0.0),
    "bias": (Case(tp=2, sequence_parallel=True, bias=True, layers=1), ORDER),  # added inside the GEMM, or after it
    "tied": (Case(tp=2, sequence_parallel=True, tied=True, layers=1), 0.0),
    "gqa": (Case(tp=2, sequence_parallel=True, gqa=True, layers=1), 0.0),
    "accumulation": (Case(tp=2, sequence_parallel=True, microbatches=3, layers=1), 0.0),
    "recompute_full": (Case(tp=2, sequence_parallel=True, recompute="full"), 0.0),
    "recompute_selective": (Case(tp=2, sequence_parallel=True, recompute="selective"), 0.0),
    "bf16": (Case(tp=2, sequence_parallel=True, bf16=True, grad_fp32=True, layers=1), 0.0),
    "distributed_optimizer": (Case(tp=2, sequence_parallel=True, distributed_optimizer=True, overlap_grad=True), 0.0),
}
FOUR = {
    "dp2": (Case(tp=2, sequence_parallel=True, overlap_grad=True), 0.0),
    "gtp2": (Case(tp=2, gtp=2, sequence_parallel=True), 0.0),
    "gtp2_padding": (Case(tp=2, gtp=2, sequence_parallel=True, alignment=16), 0.0),
    "gtp2_bf16": (Case(tp=2, gtp=2, sequence_parallel=True, bf16=True, grad_fp32=True, layers=1), 0.0),
    "gtp2_recompute": (Case(tp=2, gtp=2, sequence_parallel=True, recompute="full"), 0.0),
    "gtp2_experts": (
        Case(tp=2, gtp=2, ep=2, etp=1, egtp=2, experts=4, sequence_parallel=True, shared_expert=True, layers=1), 0.0,
    ),
}  # fmt: skip


def install(case: Case, backend: str = "collective") -> None:
    """In place of what `environment` installed."""
    gtp.megatron.uninstall()
    gtp.megatron.install(gtp.GTPConfig(alignment=case.alignment), tp_gemm_backend=backend)


def train_collective(case: Case) -> tuple[Any, list[str], int]:
    """As `train`, by collective GEMMs; the collectives of one more step over the TP group; linears that they serve."""
    from megatron.core import parallel_state

    with environment(case):
        install(case)
        job = Job(case)
        for step in range(case.steps):
            job.step(step)
        served = {
            id(m.__dict__["gtp_tp_gemm_backend"]): m
            for chunk in job.chunks
            for m in chunk.modules()
            if "gtp_tp_gemm_backend" in m.__dict__
        }
        ranks = tuple(dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()))
        result = job.result()
        result = dataclasses.replace(result, losses=list(result.losses), norms=list(result.norms))
        with collective_log() as log:
            job.step(0, update=False)
        kinds = [r.kind for r in log.started() if r.group == ranks and len(r.shape) == 2 and r.kind != "all_reduce"]
        return result, kinds, len(served)


@pytest.fixture(scope="module")
def stock() -> dict[Any, list[Any]]:
    """What Megatron's own linears give, by number of ranks and case."""
    return {}


def check(ranks: Any, size: int, case: Case, bound: float, trained: dict[Any, list[Any]]) -> None:
    """Trains without and with collective GEMMs, and compares."""
    run = ranks(size).run
    # that recomputing and padding change no number is test_parity's
    reference = dataclasses.replace(case, recompute=None, alignment=1)
    if (size, reference) not in trained:
        trained[size, reference] = run(train, reference, timeout=120)
    results = zip(trained[size, reference], run(train_collective, case, timeout=120), strict=True)
    for stock, (ours, _, backends) in results:
        assert backends == 1  # shared by all linears of the model
        assert ours.sharded == stock.sharded
        assert stock.losses[-1] != stock.losses[0]
        for before, after in zip(stock.losses, ours.losses, strict=True):
            assert abs(after - before) <= bound
        for before, after in zip(stock.norms, ours.norms, strict=True):
            assert math.isfinite(before)
            assert abs(after - before) <= max(NORM, 2 * bound) * before


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(ranks: Any, name: str, stock: dict[Any, list[Any]]) -> None:
    check(ranks, 2, *TWO[name], stock)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(ranks: Any, name: str, stock: dict[Any, list[Any]]) -> None:
    check(ranks, 4, *FOUR[name], stock)


def test_the_collectives_are_ours(ranks: Any) -> None:
    """Two layers of qkv, proj, fc1, fc2, and the output layer; each a collective forward. Backward: gather and scatter
    for column-parallel ones, one gather for row-parallel ones."""
    _, kinds, _ = ranks(2).run(train_collective, Case(tp=2, sequence_parallel=True, steps=1))[0]
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    layer = [gather, scatter, gather, scatter]
    backward_layer = [gather, gather, scatter] * 2
    assert kinds == [*layer, *layer, gather, gather, scatter, *backward_layer, *backward_layer]


# --- refusals


def refused(case: Case, settings: dict[str, Any], in_features: int) -> str:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    with environment(case):
        install(case)
        config = model_config(case)
        for name, value in settings.items():
            setattr(config, name, value)
        with pytest.raises((GTPValueError, UnsupportedError)) as error:
            ColumnParallelLinear(in_features, 8, config=config, init_method=lambda w: w, bias=False)
        return str(error.value)


@pytest.mark.parametrize("sequence_parallel, settings, in_features, message", [
    (False, {}, 32, "has sequence_parallel=False, and then no gather"),
    (True, {"defer_embedding_wgrad_compute": True}, 32, "defer_embedding_wgrad_compute=True"),
    (True, {"cpu_offloading": True}, 32, "cpu_offloading=True"),
    (True, {"mtp_detach_heads": True}, 32, "mtp_detach_heads=True"),
    (True, {}, 33, "33 in features, which do not split over 2"),
])  # fmt: skip
def test_refused_when_the_model_is_built(ranks: Any, sequence_parallel, settings, in_features, message) -> None:
    case = Case(tp=2, sequence_parallel=sequence_parallel)
    for text in ranks(2).run(refused, case, settings, in_features):
        assert message in text
        assert "gtp.megatron.install(tp_gemm_backend='collective')" in text


def one_rank_of_tp(case: Case) -> tuple[list[float], list[str]]:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    with environment(case):
        logging.disable(logging.NOTSET)
        logging.getLogger("gtp").addHandler(handler)
        try:
            install(case, "copy_engine")
            job = Job(case)
            job.step(0)
        finally:
            logging.getLogger("gtp").removeHandler(handler)
        return job.losses, [m for m in messages if "tp_gemm_backend" in m]


def test_one_tensor_parallel_rank_runs_megatrons_linears_and_says_so_once(ranks: Any) -> None:
    losses, messages = ranks(2).run(one_rank_of_tp, Case())[0]
    assert math.isfinite(losses[0])
    assert messages == [
        "gtp: tp_gemm_backend='copy_engine' has nothing to do at tensor-parallel degree 1; Megatron's linears run"
    ]


def test_install_and_uninstall() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    before = ColumnParallelLinear.__init__, ColumnParallelLinear._forward_impl, RowParallelLinear.forward
    with pytest.raises(GTPValueError, match="tp_gemm_backend must be None or one of 'auto'"):
        gtp.megatron.install(tp_gemm_backend="fast")  # type: ignore[arg-type]
    gtp.megatron.install(tp_gemm_backend="collective")
    try:
        gtp.megatron.install(tp_gemm_backend="collective")
        assert ColumnParallelLinear._forward_impl is not before[1]
        with pytest.raises(GTPStateError, match=r"installed already with .*tp_gemm_backend='collective'"):
            gtp.megatron.install()
    finally:
        gtp.megatron.uninstall()
    assert (ColumnParallelLinear.__init__, ColumnParallelLinear._forward_impl, RowParallelLinear.forward) == before


def inputs_alone() -> None:
    """One linear, module by module: outputs and the bias that is handed back, as Megatron's."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    case = Case(tp=2, sequence_parallel=True)
    results = []
    for backend in (None, "collective"):
        with environment(case):
            if backend:
                install(case, backend)
            torch.manual_seed(1)
            options = {"config": model_config(case), "init_method": torch.nn.init.normal_}
            outputs = []
            for skip in (False, True):
                column = ColumnParallelLinear(8, 12, bias=True, skip_bias_add=skip, **options)
                row = RowParallelLinear(12, 8, bias=True, input_is_parallel=True, skip_bias_add=skip, **options)
                with torch.no_grad():
                    column.bias.fill_(2.0)
                    row.bias.fill_(3.0)
                generator = torch.Generator().manual_seed(dist.get_rank())
                x = torch.randint(-2, 3, (SEQ // 2, BATCH, 8), generator=generator).float()
                y, bias = column(x)
                z, bias2 = row(y)
                outputs += [y, z, *[b for b in (bias, bias2) if b is not None]]
            results.append([o.detach() for o in outputs])
    assert len(results[0]) == len(results[1]) == 6
    for stock, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-5)  # the bias is added before or after rounding


def test_biases_and_outputs_of_single_linears(ranks: Any) -> None:
    ranks(2).run(inputs_alone)

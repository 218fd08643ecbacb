"""Megatron-Core with the flag on under gtp, against Megatron-Core without it, at the same data.

Each case trains a small GPT for five steps twice, on real gloo ranks, and compares losses and gradient norms. What
differs is the order of additions, so the bound says which sum that is; where there is none, losses are equal bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron.training import Case, train

# fp32 losses around 4.5: one unit in the last place is 4.8e-7. Gradients that are added in another order differ in
# their last bits, and Adam's steps carry that into the loss.
ORDER = 2e-6
# the norm adds squares in fp32 in an order that depends on how the parameters are cut
NORM = 2e-6

TWO = {
    "plain": (Case(gtp=2), 0.0),
    "per_token_loss": (Case(gtp=2, per_token=True), 0.0),
    "accumulation": (Case(gtp=2, microbatches=3), ORDER),  # over microbatches first, or over ranks first
    "clip": (Case(gtp=2, clip=0.1), ORDER),  # the norm's last bit scales every gradient
    "overlap_grad_reduce": (Case(gtp=2, overlap_grad=True), 0.0),
    "distributed_optimizer": (Case(gtp=2, distributed_optimizer=True), 0.0),
    "bf16": (Case(gtp=2, bf16=True, grad_fp32=True), 0.0),
    "tied": (Case(gtp=2, tied=True), ORDER),  # over uses first, or over ranks first
    "gqa": (Case(gtp=2, gqa=True), 0.0),
    "mla": (Case(gtp=2, mla=True), 0.0),
    "bias": (Case(gtp=2, bias=True), 0.0),
    "recompute_full": (Case(gtp=2, recompute="full"), 0.0),
    "recompute_selective": (Case(gtp=2, recompute="selective"), 0.0),
    "mtp": (Case(gtp=2, mtp=1), ORDER),  # the output layer is used twice
    "mtp_tied": (Case(gtp=2, mtp=2, tied=True), ORDER),
    "padding": (Case(gtp=2, alignment=32), 0.0),
    "experts": (Case(gtp=2, egtp=2, experts=4), ORDER),
    "muon": (Case(gtp=2, optimizer="muon", alignment=7), 0.0),  # shards begin in the middle of a head
    "muon_layer_wise": (Case(gtp=2, optimizer="muon", layer_wise=True, bf16=True), 0.0),
    "hybrid": (Case(gtp=2, hybrid="M*-M-"), 0.0),
}

FOUR = {
    "gtp4": (Case(gtp=4), ORDER),
    "gtp4_padding": (Case(gtp=4, alignment=16), ORDER),
    "dp2_gtp2": (Case(gtp=2, overlap_grad=True), ORDER),
    "dp2_gtp2_distopt": (
        Case(gtp=2, distributed_optimizer=True, overlap_grad=True, overlap_param=True, bucket_size=3000, clip=0.5),
        ORDER,
    ),
    "tp2_gtp2": (Case(tp=2, gtp=2), 0.0),
    "tp2_gtp2_sp": (Case(tp=2, gtp=2, sequence_parallel=True), ORDER),
    "gtp4_muon": (Case(gtp=4, optimizer="muon", alignment=5), ORDER),
    "tp2_gtp2_muon": (Case(tp=2, gtp=2, optimizer="muon"), 0.0),
    "tp2_gtp2_hybrid": (Case(tp=2, gtp=2, hybrid="M*-", tied=True), ORDER),
    "cp2_gtp2": (Case(cp=2, gtp=2), ORDER),
    "pp2_gtp2": (Case(pp=2, gtp=2, microbatches=4, tied=True), ORDER),
    "pp2_vpp2_gtp2": (Case(pp=2, vpp=2, layers=4, gtp=2, microbatches=4, overlap_grad=True), ORDER),
    "ep2_egtp2_gtp2": (Case(gtp=2, ep=2, egtp=2, experts=4, shared_expert=True), ORDER),
    "ep2_egtp2": (Case(ep=2, egtp=2, experts=4), ORDER),
    "ep2_gtp2": (Case(gtp=2, ep=2, experts=4), ORDER),
    "ep2_egtp2_per_token": (Case(ep=2, egtp=2, experts=4, per_token=True), ORDER),
    "tp2_gtp2_ep2_egtp2": (Case(tp=2, gtp=2, ep=2, etp=1, egtp=2, experts=4, sequence_parallel=True), ORDER),
}  # fmt: skip


def both(case: Case) -> tuple[Any, Any]:
    return train(case.unsharded()), train(case)


def check(run: Callable[..., list[Any]], case: Case, bound: float) -> None:
    if case.optimizer == "muon":
        pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs the package emerging-optimizers")
    results = run(both, case, timeout=120)
    last = results[-1]  # the last rank is on the last pipeline stage
    for plain, sharded in (last, results[0]):
        assert sharded.sharded
        assert not plain.sharded
        assert all(math.isfinite(norm) and norm > 0 for norm in plain.norms)
        for before, after in zip(plain.norms, sharded.norms, strict=True):
            assert abs(after - before) <= max(NORM, 2 * bound) * before
    plain, sharded = last
    assert plain.losses[-1] != plain.losses[0]
    for before, after in zip(plain.losses, sharded.losses, strict=True):
        assert abs(after - before) <= bound


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(ranks: Any, name: str):
    check(ranks(2).run, *TWO[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(ranks: Any, name: str):
    check(ranks(4).run, *FOUR[name])

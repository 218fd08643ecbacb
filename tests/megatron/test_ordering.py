"""What must have happened before what, shown with collectives that complete as late as they may.

Under `late_collectives` the output of an asynchronous collective is NaN until somebody waits for it, and its input must
not change until then. Each test has a naive twin, which fails: it proves that the delay would be seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gtp.megatron
from gtp.megatron import building
from gtp.runtime.process_group import ProcessGroupTransport
from gtp.testing.collectives import RaceError, late_collectives
from tests.megatron.training import SEQ, VOCAB, Case, Job, environment, train


@contextmanager
def late() -> Iterator[None]:
    """Late collectives, those of Megatron's parameter and gradient buffers included, which bind them at import."""
    from megatron.core.distributed import param_and_grad_buffer

    with ExitStack() as stack:
        stack.enter_context(late_collectives())
        for name, real in (
            ("dist_all_gather_func", "all_gather_into_tensor"),
            ("dist_reduce_scatter_func", "reduce_scatter_tensor"),
        ):
            through = lambda *args, real=real, **kwargs: getattr(dist, real)(*args, **kwargs)  # noqa: E731
            stack.enter_context(mock.patch.object(param_and_grad_buffer, name, through))
        yield


def on_time_and_late(case: Case) -> tuple[list[float], list[float], list[float]]:
    plain, on_time = train(case.unsharded()), train(case)
    with late():
        return plain.losses, on_time.losses, train(case).losses


type Losses = list[tuple[list[float]]]
"""By rank, as arguments of it."""


@pytest.fixture(scope="module")
def on_time(ranks: Any) -> Callable[[Case], Losses]:
    """Losses of a case on four ranks, with collectives as they are; trained once for a test and its naive twin."""
    trained: dict[Case, Losses] = {}

    def losses(case: Case) -> Losses:
        if case not in trained:
            trained[case] = [(found.losses,) for found in ranks(4).run(train, case)]
        return trained[case]

    return losses


CASES = {
    # the embedding, every layer's QKV and the output layer are [96, 32]: a pool of buffers by shape would mix them up
    "equal_shapes": Case(gtp=2),
    "recompute": Case(gtp=2, recompute="full", layers=3),
    "used_several_times": Case(gtp=2, mtp=2, tied=True),
    "accumulation": Case(gtp=2, microbatches=3, overlap_grad=True),
    "experts": Case(gtp=2, egtp=2, experts=4),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_before_it_has_arrived(ranks: Any, name: str):
    """C01: weights of one shape. C13: MTP's layers, repeated. C15: MTP's output layer, used early and at the end.
    C44, C46: a recomputed forward, beside prefetches of its own."""
    for plain, on_time, delayed in ranks(2).run(on_time_and_late, CASES[name]):
        assert delayed == on_time
        assert max(abs(a - b) for a, b in zip(plain, delayed, strict=True)) <= 2e-6  # as in test_parity


OVERLAPPED = Case(
    gtp=2, layers=4, distributed_optimizer=True, overlap_grad=True, overlap_param=True, bucket_size=3000, steps=4
)


def overlapped_param_gather(naive: bool, plain: list[float]) -> tuple[list[float], list[float]]:
    """C06, Megatron-LM issue 6389: a prefetch target lies in a bucket whose parameters are still on their way."""
    with ExitStack() as stack:
        if naive:
            stack.enter_context(mock.patch.object(building, "wait_for_param_sync"))
        stack.enter_context(late())
        return plain, train(OVERLAPPED).losses


def test_a_gather_waits_for_the_parameter_all_gather(ranks: Any, on_time: Callable[[Case], Losses]):
    """C06: no step runs on weights of the step before."""
    plain_losses = on_time(OVERLAPPED.unsharded())
    for plain, sharded in ranks(4).run(overlapped_param_gather, False, per_rank_args=plain_losses):
        assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) <= 2e-6


def naive_losses_are_nan(on_time: list[float]) -> bool:
    try:
        plain, sharded = overlapped_param_gather(True, on_time)
    except RaceError:
        return True
    return plain[0] == sharded[0] and any(math.isnan(x) for x in sharded)


def test_without_that_wait_the_prefetch_reads_what_has_not_arrived(ranks: Any, on_time: Callable[[Case], Losses]):
    assert all(ranks(4).run(naive_losses_are_nan, per_rank_args=on_time(OVERLAPPED.unsharded())))


LAYER_WISE = Case(gtp=2, optimizer="muon", layer_wise=True, bf16=True, grad_fp32=True, steps=2)


def overlapped_layer_wise() -> tuple[list[float], list[float]]:
    """Each replica updates whole weights and sends them; they are written into the others when they are waited for."""
    overlap = dataclasses.replace(LAYER_WISE, overlap_grad=True, overlap_param=True, bucket_size=3000)
    waited = train(LAYER_WISE).losses
    with late():
        return waited, train(overlap).losses


def test_parameters_that_arrive_during_the_forward_are_written_before_they_are_gathered(ranks: Any):
    """The layer-wise optimizer's parameters: the hook that waits for them writes shards, between two gathers."""
    pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs the package emerging-optimizers")
    for waited, overlapped in ranks(4).run(overlapped_layer_wise):
        assert overlapped == waited
        assert waited[0] != waited[1]


@dataclasses.dataclass
class _Gather:
    """What was so when a gather started: whether its buckets had landed, how many others had not, and whether the
    weight in use lay in another bucket."""

    landed: bool
    others: int
    others_in_flight: int
    ahead_of_its_bucket: bool


def gathers_of_a_forward() -> list[_Gather]:
    """The gathers of one forward, while parameters arrive as late as they may."""
    seen: list[_Gather] = []
    with environment(OVERLAPPED), late():
        job = Job(OVERLAPPED)
        job.step(0)
        job.step(1)
        ddp = job.chunks[0]
        in_use: list[Any] = [None]

        def landed(bucket: Any) -> bool:
            return bucket.param_gather_dispatched and bucket.param_gather_handle is None

        def gather(transport: Any, group: Any, *args: Any) -> Any:
            buckets = {ddp.param_to_bucket_group[member.owner()] for member in group.members}
            others = [bucket for bucket in ddp.bucket_groups if bucket not in buckets]
            in_flight = sum(not landed(bucket) for bucket in others)
            seen.append(_Gather(all(map(landed, buckets)), len(others), in_flight, in_use[0] not in buckets))
            return start(transport, group, *args)

        def forward(weight: Any) -> Any:
            in_use[0] = ddp.param_to_bucket_group[weight]
            return use(weight)

        start, use = ProcessGroupTransport.start_gather, gtp.megatron.MegatronGTPWeight.materialize_group_for_forward
        ids = torch.arange(SEQ).remainder(VOCAB)[None]
        with (
            mock.patch.object(ProcessGroupTransport, "start_gather", gather),
            mock.patch.object(gtp.megatron.MegatronGTPWeight, "materialize_group_for_forward", forward),
            torch.no_grad(),
        ):
            ddp(ids, ids, torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1))
    return seen


def test_a_gather_waits_for_its_own_bucket_and_no_later_one(ranks: Any):
    """Issue 6389 without giving up the overlap: what comes later in the model arrives beside the forward."""
    for gathers in ranks(4).run(gathers_of_a_forward):
        assert len(gathers) == 2 + 4 * 4
        assert all(gather.landed for gather in gathers)
        # the first gather starts with everything else on its way, the last with nothing
        assert gathers[0].others_in_flight == gathers[0].others >= 4
        assert gathers[-1].others_in_flight == 0
        # and some are prefetches of a bucket that the layer in use does not touch
        assert sum(gather.ahead_of_its_bucket for gather in gathers) >= 4


class MovingTransport(ProcessGroupTransport):
    """Keeps what peers read in memory of its own, as the copy engine does."""

    peers_read = True

    def prepare(self, groups: Any) -> None:
        for member in (member for group in groups for member in group.members):
            view = member.send.clone()
            if member.send is member.shard:
                member.shard = view
            member.send = view


def moved(naive: bool, on_time: list[float]) -> tuple[list[float], list[float], bool]:
    def choose(config: Any, groups: Any, device: torch.device) -> tuple[Any, str]:
        return MovingTransport(device), "test"

    def in_the_buffer(job: Job) -> bool:
        ddp = job.chunks[0]
        spans = [(b.param_data.data_ptr(), b.param_data.data_ptr() + b.param_data.nbytes) for b in ddp.buffers]
        weights = [p for p in ddp.parameters() if isinstance(p, gtp.megatron.MegatronGTPWeight)]
        return all(any(start <= w.data_ptr() < stop for start, stop in spans) for w in weights)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(building, "choose_transport", choose))
        if naive:
            stack.enter_context(mock.patch.object(gtp.megatron.MegatronGTPWeight, "adopt", gtp.GTPWeight.adopt))
        stack.enter_context(late())
        delayed = train(OVERLAPPED, in_the_buffer)
    return on_time, delayed.losses, delayed.extra


def test_weights_stay_in_the_buffer_that_the_distributed_optimizer_gathers_into(
    ranks: Any, on_time: Callable[[Case], Losses]
):
    """C06. A transport with memory of its own gets a copy, at each line, of parameters that have arrived."""
    for before, delayed, inside in ranks(4).run(moved, False, per_rank_args=on_time(OVERLAPPED)):
        assert inside
        assert delayed == before


def test_weights_moved_out_of_that_buffer_would_never_change(ranks: Any, on_time: Callable[[Case], Losses]):
    for before, delayed, inside in ranks(4).run(moved, True, per_rank_args=on_time(OVERLAPPED)):
        assert not inside
        assert delayed[0] == before[0]
        assert max(abs(a - b) for a, b in zip(before, delayed, strict=True)) > 1e-3


def gradients_at_the_hook(case: Case, eager: bool) -> tuple[set[int], bool]:
    """(how often each weight's hook ran in a step, whether main_grad was complete each time)."""
    seen: dict[str, list[torch.Tensor]] = {}
    complete: list[bool] = []
    with environment(case), late(), ExitStack() as stack:
        if eager:
            stack.enter_context(mock.patch.object(gtp.megatron.MegatronGTPWeight, "finalize_group_grads", _eager))
        job = Job(case)
        weights = [p for p in job.chunks[0].parameters() if isinstance(p, gtp.megatron.MegatronGTPWeight)]
        for weight in weights:
            _record(weight, seen)
        finalize = job.config.finalize_model_grads_func

        def check(*args: Any, **kwargs: Any) -> Any:
            for weight in weights:
                announced = seen[weight.name][case.microbatches - 1]
                complete.append(torch.equal(announced, weight.main_grad) and bool(announced.any()))
            return finalize(*args, **kwargs)

        job.config.finalize_model_grads_func = check
        job.step(0)
    return {len(grads) for grads in seen.values()}, all(complete)


def _record(weight: Any, seen: dict[str, list[torch.Tensor]]) -> None:
    hook = weight._grad_accum_hook

    def recording() -> None:
        seen.setdefault(weight.name, []).append(weight.main_grad.clone())
        hook()

    weight.register_grad_accum_hook(None, recording)


def _eager(weight: Any, wgrads: Any) -> Any:
    """What a finalize would be that announces the gradient when its reduction starts."""
    outcome = gtp.GTPWeight.finalize_group_grads(weight, wgrads)
    weight._grad_accum_hook()
    return outcome


@pytest.mark.parametrize("case", [Case(gtp=2, tied=True, mtp=1), Case(gtp=2, microbatches=3)], ids=["shared", "micro"])
def test_grad_ready_comes_once_per_backward_with_the_whole_gradient(ranks: Any, case: Case):
    for counts, complete in ranks(2).run(gradients_at_the_hook, case, False):
        assert counts == {case.microbatches}
        assert complete


def test_an_early_grad_ready_would_be_seen(ranks: Any):
    assert [complete for _, complete in ranks(2).run(gradients_at_the_hook, Case(gtp=2), True)] == [False, False]


READY = Case(gtp=2, distributed_optimizer=True, overlap_grad=True, bucket_size=3000, steps=4)


def reduced_over_replicas(naive: bool, plain: list[float]) -> tuple[list[float], list[float]]:
    """Losses without gtp and with it. DistributedDataParallel sends a bucket to the replicas when every hook of its
    weights has run; the reduction over the GTP ranks, which is to come before that, arrives as late as it may."""
    with ExitStack() as stack:
        if naive:
            weight = gtp.megatron.MegatronGTPWeight
            stack.enter_context(mock.patch.object(weight, "finalize_group_grads", _eager))
            stack.enter_context(mock.patch.object(weight, "run_gradient_hooks", gtp.GTPWeight.run_gradient_hooks))
        stack.enter_context(late())
        return plain, train(READY).losses


def test_replicas_get_gradients_that_are_reduced_over_gtp(ranks: Any, on_time: Callable[[Case], Losses]):
    plain_losses = on_time(READY.unsharded())
    for plain, sharded in ranks(4).run(reduced_over_replicas, False, per_rank_args=plain_losses):
        assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) <= 2e-6


def naive_reductions_are_seen(on_time: list[float]) -> bool:
    try:
        plain, sharded = reduced_over_replicas(True, on_time)
    except RaceError as error:
        return "changed while" in str(error)
    return plain[0] == sharded[0] and not abs(plain[-1] - sharded[-1]) <= 1e-3


def test_hooks_that_run_when_the_reduction_starts_send_what_has_not_arrived(
    ranks: Any, on_time: Callable[[Case], Losses]
):
    assert all(ranks(4).run(naive_reductions_are_seen, per_rank_args=on_time(READY.unsharded())))

"""The collective GEMMs over real gloo ranks, against the whole layer in one process.

Run one: `pytest tests/ops/test_collective_linear.py -k exact`. GPU backends: test_collective_gpu.py.
"""

from __future__ import annotations

import dataclasses
import datetime
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gtp.errors import DesyncError, GTPValueError
from gtp.ops.collective_backends import CollectiveBackend, gemm_backend
from gtp.ops.collective_backends.agreement import Agreement
from gtp.ops.collective_linear import all_gather_linear, all_gather_linear_multi, linear_reduce_scatter
from gtp.testing.collectives import collective_log, late_collectives
from gtp.testing.ranks import RankFailure
from tests.ops.collective_problem import UNIT_ROUNDOFF, Case, Gradients, magnitude, plain, reference


def backend(debug: bool = False) -> CollectiveBackend:
    made = gemm_backend("collective", dist.group.WORLD, debug=debug)
    assert isinstance(made, CollectiveBackend)
    return made


def run_gather(case: Case) -> Gradients:
    """This rank's part of the layer by AllGatherLinear, with late collectives."""
    x = plain(case.sequence_part(case.x()))
    w = plain(case.part(case.weight(), 0))
    b = None if case.b() is None else plain(case.part(case.b(), 0))
    with late_collectives():
        y = all_gather_linear(x, w, b, backend=backend(), sequence_dim=case.sequence_dim)
        y.backward(case.part(case.dy(), -1))
    return Gradients(y.detach(), x.grad, w.grad, None if b is None else b.grad)


def run_scatter(case: Case) -> Gradients:
    """This rank's part of the layer by LinearReduceScatter."""
    x = plain(case.part(case.x(), -1))
    w = plain(case.part(case.weight(), 1))
    b = None if case.b() is None else plain(case.b())
    with late_collectives():
        y = linear_reduce_scatter(x, w, b, backend=backend(), sequence_dim=case.sequence_dim)
        y.backward(case.sequence_part(case.dy()))
    return Gradients(y.detach(), x.grad, w.grad, None if b is None else b.grad)


CASES = [
    Case(ranks=ranks, batch=batch, dtype=dtype, bias=bias, sequence_dim=sequence_dim)
    for ranks in (2, 4)
    for batch, sequence_dim in ((1, 0), (3, 0), (3, 1))
    for dtype, bias in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False))
]


def check_gather_exact(cases: list[Case]) -> None:
    for case in cases:
        got, want = run_gather(case), reference(case)
        assert got.y.dtype == case.dtype
        assert torch.equal(got.y.double(), case.part(want.y, -1)), case
        assert torch.equal(got.dx.double(), case.sequence_part(want.dx)), case
        assert torch.equal(got.dw.double(), case.part(want.dw, 0)), case
        if case.bias:
            assert torch.equal(got.db.double(), case.part(want.db, 0)), case


def check_scatter_exact(cases: list[Case]) -> None:
    for case in cases:
        got, want = run_scatter(case), reference(case)
        assert got.y.dtype == case.dtype
        assert torch.equal(got.y.double(), case.sequence_part(want.y)), case
        assert torch.equal(got.dx.double(), case.part(want.dx, -1)), case
        assert torch.equal(got.dw.double(), case.part(want.dw, 1)), case
        if case.bias:
            # whole on every rank, though each rank was given the gradient of its rows only
            assert torch.equal(got.db.double(), want.db), case


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", [check_gather_exact, check_scatter_exact])
def test_exact_values_match_the_whole_layer(ranks, world, check):
    """Batch 1 and 3, sequence first and batch first, fp32 and bf16, with and without bias. Batch 3 with unequal values
    is what catches rows gathered batch-outermost."""
    ranks(world).run(check, [c for c in CASES if c.ranks == world])


def check_gather_rounding(case: Case) -> float:
    got, want = run_gather(case), reference(case)
    x, dy = case.x().flatten(0, 1), case.part(case.dy(), -1).flatten(0, 1)
    w, b = case.part(case.weight(), 0), case.part(case.b(), 0)
    # nothing crosses ranks in these: the same GEMM on the gathered operand, bit for bit
    assert torch.equal(got.y.flatten(0, 1), torch.nn.functional.linear(x, w, b))
    assert torch.equal(got.dw, dy.t() @ x)
    assert torch.equal(got.db, dy.sum(0))
    return _check_sum_over_ranks(case, got.dx, case.sequence_part(want.dx), case.dy().flatten(0, 1), case.weight())


def check_scatter_rounding(case: Case) -> float:
    got, want = run_scatter(case), reference(case)
    x, dy = case.part(case.x(), -1).flatten(0, 1), case.dy().flatten(0, 1)
    assert torch.equal(got.dx.flatten(0, 1), dy @ case.part(case.weight(), 1))
    assert torch.equal(got.dw, dy.t() @ x)
    assert torch.equal(got.db, dy.sum(0))
    without_bias = want.y - case.b().double()
    got_without_bias = got.y.double() - case.b().double()
    # adding the bias to a sum of either sign rounds once more, by at most a roundoff of the result
    extra = UNIT_ROUNDOFF[case.dtype] * case.sequence_part(want.y).abs()
    return _check_sum_over_ranks(
        case, got_without_bias, case.sequence_part(without_bias), case.x().flatten(0, 1), case.weight().t(), extra
    )


def _check_sum_over_ranks(
    case: Case,
    got: torch.Tensor,
    want: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    extra: torch.Tensor | float = 0.0,
) -> float:
    """`got` is this rank's rows of `a @ b`, whose contracted dim was split over ranks.

    Each rank's product is rounded once and each addition over ranks once, by a unit roundoff of what it gives;
    accumulation inside an fp32 GEMM adds at most terms + 1 fp32 roundoffs of the sum of absolute values.

    Returns:
        How many times the bound an average instead of a sum would miss by, in the median.
    """
    parts = zip(a.double().chunk(case.ranks, 1), b.double().chunk(case.ranks, 0), strict=True)
    products = [part_a @ part_b for part_a, part_b in parts]
    running, rounded = torch.zeros_like(products[0]), torch.zeros_like(products[0])
    for product in products:
        running = running + product
        rounded += product.abs() + running.abs()
    inside = (a.shape[1] + 1) * UNIT_ROUNDOFF[torch.float32] * magnitude(a, b)
    # 1.01: a roundoff is relative to the rounded value, and second-order terms
    bound = 1.01 * UNIT_ROUNDOFF[case.dtype] * rounded + inside
    bound = case.sequence_part(bound.view(case.sequence, case.batch, -1)) + 1.01 * extra
    assert ((got.double() - want).abs() <= bound).all()
    return float((want.abs() * (1 - 1 / case.ranks) / bound).median())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check", [check_gather_rounding, check_scatter_rounding])
def test_rounding_only_where_ranks_are_added(ranks, dtype, check):
    case = Case(dtype=dtype, sequence=64, k=64, n=96, integers=False)
    for factor in ranks(2).run(check, case):
        assert factor > 10


# --- several weights, one gather


def run_multi(case: Case, used: tuple[bool, ...], frozen: tuple[bool, ...]) -> tuple[Gradients, list]:
    x = plain(case.sequence_part(case.x()))
    whole = [case.draw((case.n, case.k), 10 + i) for i in range(len(used))]
    ws = [plain(case.part(w, 0)).requires_grad_(not f) for w, f in zip(whole, frozen, strict=True)]
    with collective_log() as log:
        ys = all_gather_linear_multi(x, ws, backend=backend(), sequence_dim=case.sequence_dim)
        log.mark("backward")
        dy = case.part(case.dy(), -1)
        sum((y * dy).sum() for y, u in zip(ys, used, strict=True) if u).backward()

    x0 = case.x().double().requires_grad_()
    w0 = [w.double().requires_grad_(not f) for w, f in zip(whole, frozen, strict=True)]
    y0 = [torch.nn.functional.linear(x0, w) for w in w0]
    sum((y * case.dy().double()).sum() for y, u in zip(y0, used, strict=True) if u).backward()
    for y, want in zip(ys, y0, strict=True):
        assert torch.equal(y.detach().double(), case.part(want.detach(), -1))
    assert torch.equal(x.grad.double(), case.sequence_part(x0.grad))
    for w, want in zip(ws, w0, strict=True):
        assert (w.grad is None) == (want.grad is None)
        if w.grad is not None:
            assert torch.equal(w.grad.double(), case.part(want.grad, 0))
    return log.lines()


@pytest.mark.parametrize("used, frozen, backward", [
    ((True, True, True), (False, False, False), ["all_gather_into_tensor", "reduce_scatter_tensor"]),
    ((True, False, True), (False, False, False), ["all_gather_into_tensor", "reduce_scatter_tensor"]),
    ((True, True, True), (False, True, False), ["all_gather_into_tensor", "reduce_scatter_tensor"]),
    ((True, True, True), (True, True, True), ["reduce_scatter_tensor"]),
])  # fmt: skip
def test_several_weights_share_one_gather(ranks, used, frozen, backward):
    """One gather forward whatever the number of weights; two collectives backward; frozen weights need no x again."""
    for lines in ranks(2).run(run_multi, Case(), used, frozen):
        started = [line.split()[1] for line in lines if line.startswith(("start", "mark"))]
        assert started == ["all_gather_into_tensor", "backward", *backward]


# --- collectives and memory


def run_collectives(frozen: bool, input_grad: bool) -> tuple[list[str], list[str]]:
    case = Case(sequence=8, batch=1, k=8, n=12)
    logs = []
    for run in ("gather", "scatter"):
        gathers = run == "gather"
        x = (case.sequence_part(case.x()) if gathers else case.part(case.x(), -1)).detach().requires_grad_(input_grad)
        w = case.part(case.weight(), 0 if gathers else 1).contiguous().detach().requires_grad_(not frozen)
        op = all_gather_linear if gathers else linear_reduce_scatter
        with collective_log() as log:
            y = op(x, w, backend=backend())
            log.mark("backward")
            if y.requires_grad:
                y.sum().backward()
        logs.append([line for line in log.lines() if not line.startswith("wait")])
    return tuple(logs)


def test_which_collectives_run(ranks):
    gather, scatter = ranks(2).run(run_collectives, False, True)[0]
    # forward gathers rows [8, 8]; wgrad gathers columns, transposed [8, 8]; dgrad scatters [8, 8] into [4, 8]
    assert gather == [
        "start all_gather_into_tensor (8, 8)",
        "mark backward",
        "start all_gather_into_tensor (8, 8)",
        "start reduce_scatter_tensor (4, 8)",
    ]
    # forward scatters y [8, 12] into [4, 12]; one gather of its gradient serves wgrad and dgrad
    assert scatter == [
        "start reduce_scatter_tensor (4, 12)",
        "mark backward",
        "start all_gather_into_tensor (8, 12)",
    ]


def test_no_collective_for_what_nobody_needs(ranks):
    gather, scatter = ranks(2).run(run_collectives, True, True)[0]
    assert [line.split()[1] for line in gather] == ["all_gather_into_tensor", "backward", "reduce_scatter_tensor"]
    assert [line.split()[1] for line in scatter] == ["reduce_scatter_tensor", "backward", "all_gather_into_tensor"]
    gather, scatter = ranks(2).run(run_collectives, False, False)[0]
    assert [line.split()[1] for line in gather] == ["all_gather_into_tensor", "backward", "all_gather_into_tensor"]
    assert [line.split()[1] for line in scatter] == ["reduce_scatter_tensor", "backward", "all_gather_into_tensor"]
    gather, scatter = ranks(2).run(run_collectives, True, False)[0]
    assert [line.split()[1] for line in gather] == ["all_gather_into_tensor", "backward"]


def saved_shapes(grad_enabled: bool) -> list[tuple[int, ...]]:
    case = Case(batch=1, sequence=16, k=8, n=4)
    shapes: list[tuple[int, ...]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(t.shape))
        return t

    x = plain(case.sequence_part(case.x()))
    w = plain(case.part(case.weight(), 0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.set_grad_enabled(grad_enabled):
        all_gather_linear(x, w, backend=backend())
    return shapes


def test_the_gathered_input_is_not_kept(ranks):
    """Saved: this rank's K-slice of the whole input, as many elements as the input; and the weight."""
    assert ranks(2).run(saved_shapes, True)[0] == [(16, 4), (2, 8)]
    assert ranks(2).run(saved_shapes, False)[0] == []


# --- the cases of kind P


def sum_not_average() -> torch.Tensor:
    return linear_reduce_scatter(torch.ones(6, 5), torch.full((4, 5), 3.0), backend=backend())


def test_c68_sum_and_not_average(ranks):
    """C68. Sums over ranks are sums; at 4 ranks see `test_exact_values_match_the_whole_layer`."""
    for y in ranks(2).run(sum_not_average):
        assert torch.equal(y, torch.full((3, 4), 30.0))


def non_contiguous(case: Case) -> None:
    """Each odd operand against its contiguous copy, in both ops. Integers: some CPUs round by an operand's layout."""
    x_rows, x_cols = case.sequence_part(case.x()).flatten(0, 1), case.part(case.x(), -1).flatten(0, 1)
    w_rows, w_cols = case.part(case.weight(), 0), case.part(case.weight(), 1)
    odd = {
        "transposed": lambda t: t.t().contiguous().t(),
        "every second": lambda t: torch.stack([t, t + 7], dim=-1)[..., 0],
        "expanded": lambda t: t[:1].expand(t.shape),
    }
    for op, x, w in ((all_gather_linear, x_rows, w_rows), (linear_reduce_scatter, x_cols, w_cols)):
        for name, make in odd.items():
            for which in ("x", "w", "dy"):
                grads = []
                for contiguous in (False, True):
                    args = {"x": x, "w": w}
                    if which in args:
                        args[which] = make(args[which])
                        assert not args[which].is_contiguous() or name == "expanded"
                    leaf_x, leaf_w = (t.detach().requires_grad_() for t in args.values())
                    if contiguous:
                        leaf_x, leaf_w = plain(leaf_x), plain(leaf_w)
                    y = op(leaf_x, leaf_w, backend=backend())
                    dy = case.draw(tuple(y.shape), 5)
                    if which == "dy":
                        dy = make(dy)
                    y.backward(dy.contiguous() if contiguous else dy)
                    grads.append((y.detach(), leaf_x.grad, leaf_w.grad))
                for got, want in zip(*grads, strict=True):
                    assert torch.equal(got, want), (op.__name__, name, which)


def test_c70_non_contiguous_operands(ranks):
    """C70. Equal to the contiguous run."""
    ranks(2).run(non_contiguous, Case())


def test_c70_gradient_of_a_sum(ranks):
    """C70. `.sum().backward()` hands in an expanded gradient, all strides 0."""
    gather, scatter = ranks(2).run(run_collectives, False, True)[0]
    assert len(gather) == 4
    assert len(scatter) == 3


def last_dim() -> list[str]:
    messages = []
    for op, x, w in (
        (all_gather_linear, torch.ones(2, 3, 6), torch.ones(8, 6)),
        (linear_reduce_scatter, torch.ones(2, 3, 6), torch.ones(8, 6)),
    ):
        for dim in (-1, 2):
            with pytest.raises(GTPValueError) as error:
                op(x, w, backend=backend(), sequence_dim=dim)
            messages.append(str(error.value))
    return messages


def test_c71_last_dim_is_refused(ranks):
    """C71. An error that names the dim."""
    for message in ranks(2).run(last_dim)[0]:
        assert "is the last dim of x (2, 3, 6)" in message
        assert "one of dims 0 to 1" in message


def rows_do_not_divide(rows: int) -> str:
    with pytest.raises(GTPValueError) as error:
        linear_reduce_scatter(torch.ones(rows, 6), torch.ones(8, 6), backend=backend())
    return str(error.value)


@pytest.mark.parametrize("world, rows", [(2, 7), (4, 6)])
def test_c72_rows_that_do_not_divide(ranks, world, rows):
    """C72. An error before any collective."""
    for message in ranks(world).run(rows_do_not_divide, rows):
        assert f"a sequence of {rows}" in message
        assert f"does not split over {world} ranks: pad it" in message


def no_rows(case: Case) -> None:
    for run, axis in ((run_gather, 0), (run_scatter, 1)):
        got = run(case)
        assert got.y.numel() == 0
        assert got.dx.numel() == 0
        assert torch.equal(got.dw, torch.zeros_like(case.part(case.weight(), axis)))
        assert torch.equal(got.db, torch.zeros_like(got.db))


def test_c72_no_rows(ranks):
    """C72. Empty outputs and zero weight gradients on every rank."""
    ranks(2).run(no_rows, Case(sequence=0))
    ranks(4).run(no_rows, Case(ranks=4, sequence=0, bias=True))


def unequal_rows(kind: str, debug: bool, known: tuple[int, ...]) -> str:
    rank = dist.get_rank()
    shared = backend(debug)
    for rows in known:
        all_gather_linear(torch.ones(rows, 8), torch.ones(3, 8), backend=shared)
        linear_reduce_scatter(torch.ones(rows, 8), torch.ones(3, 8), backend=shared)
    gathers = kind == "gather" or (kind == "other op" and rank == 0)
    op = all_gather_linear if gathers else linear_reduce_scatter
    with pytest.raises(DesyncError) as error:
        op(torch.ones(4 + 2 * rank, 8), torch.ones(3, 8), backend=shared)
    return str(error.value)


@pytest.mark.parametrize("known", [(), (4,), (4, 6)], ids=["new shapes", "one is known", "both are known"])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", ["gather", "scatter", "other op"])
def test_c72_unequal_rows_are_an_error_on_every_rank(ranks, kind, debug, known):
    """C72. And not a hang, whatever was called before."""
    for message in ranks(2).run(unequal_rows, kind, debug, known, timeout=30):
        assert "disagree on the next collective GEMM" in message
        assert "rank 0: " in message
        assert "rank 1: " in message
        assert "pad the sequence" in message


def uncompared_before() -> list[str]:
    agreement, gpu = Agreement(dist.group.WORLD, every_call=False), torch.device("cuda", 0)
    mine = ("gather", 4 + 2 * dist.get_rank(), 8, torch.float32)
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True):
        agreement.check(mine, gpu)
    messages = []
    for _ in range(2):
        with pytest.raises(DesyncError) as error:
            agreement.check(mine, gpu)
        messages.append(str(error.value))
    return messages


def test_c72_a_shape_counts_as_known_when_ranks_have_agreed_on_it(ranks):
    """C72. Not when it was seen in a capture, where nothing is compared, nor after ranks were found to disagree."""
    for messages in ranks(2).run(uncompared_before, timeout=30):
        for message in messages:
            assert "rank 0: gather (4, 8) torch.float32; rank 1: gather (6, 8) torch.float32" in message


def left_alone(seconds: float) -> str | None:
    group = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)
    if dist.get_rank() == 1:
        return None
    with pytest.raises(DesyncError) as error:
        all_gather_linear(torch.ones(4, 8), torch.ones(3, 8), backend=gemm_backend("collective", group))
    return str(error.value)


def test_c39_a_rank_that_does_not_come_is_named_when_the_groups_time_is_over(ranks):
    """C39. The time-out of the process group counts for what ranks tell each other too."""
    message = ranks(2).run(left_alone, 1.5, timeout=30)[0]
    assert "rank 0 is about to do gather (4, 8) torch.float32" in message
    assert "rank 1 did not come within 1.5 s" in message


def k_does_not_split() -> str:
    with pytest.raises(GTPValueError) as error:
        all_gather_linear(torch.ones(4, 7), torch.ones(3, 7), backend=backend())
    return str(error.value)


def test_in_features_must_split(ranks):
    assert "7 in features do not split over 2 ranks" in ranks(2).run(k_does_not_split)[0]


def autocast(case: Case) -> None:
    wide = dataclasses.replace(case, dtype=torch.float32)
    x, w, b = plain(wide.sequence_part(wide.x())), plain(wide.part(wide.weight(), 0)), plain(wide.part(wide.b(), 0))
    with torch.autocast("cpu", torch.bfloat16):
        y = all_gather_linear(x, w, b, backend=backend())
    assert y.dtype == torch.bfloat16
    y.backward(wide.part(wide.dy(), -1).bfloat16())
    want = reference(case)
    assert torch.equal(y.double(), case.part(want.y, -1))
    assert torch.equal(w.grad.double(), case.part(want.dw, 0))
    assert (w.grad.dtype, x.grad.dtype, b.grad.dtype) == (torch.float32,) * 3


def test_autocast_like_f_linear(ranks):
    ranks(2).run(autocast, Case())


def test_a_mesh_or_a_member_of_another_group_is_refused():
    with pytest.raises(GTPValueError, match="must be one of 'auto', 'collective', 'symm_mem', 'copy_engine'"):
        gemm_backend("nccl", None)  # type: ignore[arg-type]
    with pytest.raises(GTPValueError, match="must be a ProcessGroup or a 1-d DeviceMesh, got str"):
        gemm_backend("collective", "tp")  # type: ignore[arg-type]


def cuda_backend(name: str) -> str:
    with pytest.raises(GTPValueError) as error:
        gemm_backend(name, dist.group.WORLD, device="cpu")
    return str(error.value)


@pytest.mark.parametrize("name", ["symm_mem", "copy_engine"])
def test_c79_no_fast_path_on_the_cpu(ranks, name):
    """C79. Refused at set-up; "auto" runs the collective backend and logs why."""
    for message in ranks(2).run(cuda_backend, name):
        assert f"tp_gemm_backend='{name}' cannot serve group" in message
        assert "cpu has no copy engines" in message
        assert "Use 'collective', which runs everywhere" in message


def auto_on_cpu() -> tuple[str, list[str]]:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gtp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return gemm_backend("auto", dist.group.WORLD, device="cpu").name, messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_auto_says_what_it_took(ranks):
    name, messages = ranks(2).run(auto_on_cpu)[0]
    assert name == "collective"
    assert len(messages) == 1
    assert "'auto' runs 'collective'" in messages[0]


def test_a_failing_rank_is_seen(ranks):
    # the helpers above assert inside ranks: make sure that such a failure reaches the test
    with pytest.raises(RankFailure, match="does not split"):
        ranks(2).run(rows_do_not_divide_unguarded)


def rows_do_not_divide_unguarded() -> None:
    linear_reduce_scatter(torch.ones(7, 6), torch.ones(8, 6), backend=backend())

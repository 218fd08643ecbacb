"""The collective GEMMs on real streams, every backend. One GPU is enough: two ranks share it, over gloo.

`test_copy_engine_backend.py` searches the orders of events without a GPU; here it is shown that the driver does what
the simulation assumes, and that all backends give the same numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._symmetric_memory import get_symm_mem_workspace
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.errors import GTPStateError, PeerError
from gtp.modules import FeedForward, FusedSwiGLU
from gtp.ops import GemmBackend, all_gather_linear, all_gather_linear_multi, gemm_backend, linear_reduce_scatter
from gtp.ops.collective_backends import auto, copy_engine
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend
from gtp.testing.ranks import RankPool, RankPools, rank, subgroup
from tests.modules.llama import Llama, batch
from tests.ops.collective_problem import Case, Gradients, reference
from tests.reference import full_grad

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

FUSED = ["symm_mem", "copy_engine"]
EVERY = ["collective", *FUSED]
SLEEP = 2_000_000  # cycles: about a millisecond, longer than any operation here


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Ranks with a CUDA device each as far as there are some, else sharing."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    made = RankPools()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair(pools: RankPools) -> RankPool:
    return pools(2)


def device_of_rank() -> torch.device:
    device = torch.device("cuda", rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make(name: str) -> GemmBackend:
    return gemm_backend(name, dist.group.WORLD, device=device_of_rank())


def on_device(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().clone(memory_format=torch.contiguous_format).cuda().requires_grad_()


def run_gather(case: Case, backend: GemmBackend) -> Gradients:
    x, w = on_device(case.sequence_part(case.x())), on_device(case.part(case.weight(), 0))
    b = on_device(case.part(case.b(), 0)) if case.bias else None
    y = all_gather_linear(x, w, b, backend=backend, sequence_dim=case.sequence_dim)
    y.backward(case.part(case.dy(), -1).cuda())
    return Gradients(y.detach(), x.grad, w.grad, None if b is None else b.grad)


def run_scatter(case: Case, backend: GemmBackend) -> Gradients:
    x, w = on_device(case.part(case.x(), -1)), on_device(case.part(case.weight(), 1))
    b = on_device(case.b()) if case.bias else None
    y = linear_reduce_scatter(x, w, b, backend=backend, sequence_dim=case.sequence_dim)
    y.backward(case.sequence_part(case.dy()).cuda())
    return Gradients(y.detach(), x.grad, w.grad, None if b is None else b.grad)


def same(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert torch.equal(got.cpu().double(), want.double()), what


def exact(name: str, world: int) -> None:
    """Integers: every sum is exact, whatever the order, so any difference is a mix-up."""
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = make(name)
    for split in (False, True):
        with mock.patch.object(copy_engine, "_TILE", 1 if split else 1 << 40):
            for case in (
                Case(ranks=world),
                Case(ranks=world, sequence_dim=1, dtype=torch.bfloat16),
                Case(ranks=world, batch=1, sequence=32, k=64, n=128, dtype=torch.bfloat16),
                Case(ranks=world, batch=1, sequence=12, k=24, n=20),
                Case(ranks=world, sequence=0),
            ):
                case.bias = backend.takes_bias
                want = reference(case)
                got = run_gather(case, backend)
                same(got.y, case.part(want.y, -1), case)
                same(got.dx, case.sequence_part(want.dx), case)
                same(got.dw, case.part(want.dw, 0), case)
                got_scatter = run_scatter(case, backend)
                same(got_scatter.y, case.sequence_part(want.y), case)
                same(got_scatter.dx, case.part(want.dx, -1), case)
                same(got_scatter.dw, case.part(want.dw, 1), case)
                if case.bias:
                    same(got.db, case.part(want.db, 0), case)
                    same(got_scatter.db, want.db, case)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("world", [2, 4])
def test_exact_values_match_the_whole_layer(pools, name, world):
    pools(world).run(exact, name, world, timeout=150)


def large(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16)


def agree() -> None:
    """Random bf16 at sizes that are cut: where nothing crosses ranks the backends agree bit for bit (cuBLAS adds along
    K in one order at these shapes, however the rows are cut); sums over ranks agree to a few roundoffs."""
    m, k, n = 4096, 2048, 4096
    results = {}
    for name in EVERY:
        backend = make(name)
        x = large(10 + rank(), m // 2, k).requires_grad_()
        w = large(20 + rank(), n // 2, k).requires_grad_()
        y = all_gather_linear(x, w, backend=backend)
        y.backward(large(30 + rank(), m, n // 2))
        x2 = large(40 + rank(), m, k // 2).requires_grad_()
        w2 = large(50 + rank(), n, k // 2).requires_grad_()
        y2 = linear_reduce_scatter(x2, w2, backend=backend)
        y2.backward(large(60 + rank(), m // 2, n))
        results[name] = {"y": y, "dw": w.grad, "dx2": x2.grad, "dw2": w2.grad}, {"dx": x.grad, "y2": y2}
    base_alone, base_summed = results["collective"]
    for name in FUSED:
        alone, summed = results[name]
        for key, value in alone.items():
            assert torch.equal(value, base_alone[key]), (name, key)
        for key, value in summed.items():
            # two products and a sum, each rounded to bf16 (2^-8 of values up to several hundred)
            scale = float(base_summed[key].abs().max())
            error = float((value.float() - base_summed[key].float()).abs().max())
            assert error <= 4 * 2.0**-8 * scale, (name, key, error, scale)


def test_backends_agree(pair):
    pair.run(agree, timeout=150)


def drift() -> dict[str, dict[str, float]]:
    """Root mean square of the error against fp64, relative, of the two products that add over ranks."""
    m, k, n = 2048, 2048, 1024
    device_of_rank()
    xs, ws = [large(40 + r, m, k) for r in range(2)], [large(50 + r, n, k) for r in range(2)]
    dys = [large(60 + r, m, k) for r in range(2)]
    mine = slice(rank() * m // 2, (rank() + 1) * m // 2)
    scatter = sum(x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True))[mine]
    dgrad = sum(dy.double() @ w.double().t() for dy, w in zip(dys, ws, strict=True))[mine]
    # one process's GEMM rounds once
    found = {"stock": {"y": relative(scatter.bfloat16(), scatter), "dx": relative(dgrad.bfloat16(), dgrad)}}
    for name in EVERY:
        backend = make(name)
        y = linear_reduce_scatter(xs[rank()], ws[rank()], backend=backend)
        x = large(70 + rank(), m // 2, n).requires_grad_()
        all_gather_linear(x, ws[rank()].t().contiguous(), backend=backend).backward(dys[rank()])
        found[name] = {"y": relative(y, scatter), "dx": relative(x.grad, dgrad)}
    return found


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def test_what_drifts_and_how_far(pair):
    """bf16, fp64 as judge. Row-parallel outputs and column-parallel dgrads are sums over ranks: each rank's part is
    rounded to bf16, then the sum, where one GEMM rounds once. Independent roundings of parts of 1/sqrt(2) of the sum's
    size: sqrt(2) times one rounding's error at two ranks, for every backend."""
    for found in pair.run(drift):
        for product in ("y", "dx"):
            once = found["stock"][product]
            assert 2.0**-10 < once < 2.0**-9
            for name in EVERY:
                assert 1.3 * once < found[name][product] < 1.55 * once, (name, product, found)


def with_delays(name: str) -> None:
    """One rank sleeps at random places; operands are new each time, and overwritten right after the call."""
    device = device_of_rank()
    backend = make(name)
    chooser = torch.Generator().manual_seed(5)
    bad = torch.zeros((), dtype=torch.int64, device=device)
    sizes = [(64, 128, 256), (1024, 512, 1024), (3, 16, 8)]
    for step in range(30):
        m, k, n = sizes[step % 3]

        def values(seed: int, *shape: int, step: int = step) -> torch.Tensor:
            generator = torch.Generator("cuda").manual_seed(1000 * step + seed)
            return torch.randint(-2, 3, shape, generator=generator, device=device).bfloat16()

        late = int(torch.randint(3, (), generator=chooser))
        if late == rank():
            torch.cuda._sleep(SLEEP)
        shards = [values(r, m, k) for r in range(2)]
        x = shards[rank()].clone().requires_grad_()
        w = values(9, n, k)
        y = all_gather_linear(x, w, backend=backend)
        x.data.fill_(float("nan"))
        bad += (y != torch.cat(shards) @ w.t()).sum()
        if late == 1 - rank():
            torch.cuda._sleep(SLEEP)
        parts = [values(20 + r, 2 * m, k) for r in range(2)]
        weights = [values(30 + r, n, k) for r in range(2)]
        a = parts[rank()].clone()
        out = linear_reduce_scatter(a, weights[rank()], backend=backend)
        a.fill_(float("nan"))
        total = sum(p.float() @ q.float().t() for p, q in zip(parts, weights, strict=True))
        # integers: exact in fp32; a product above 256 is rounded to bf16, by at most 2 at these sizes and twice
        bad += ((out.float() - total[rank() * m : (rank() + 1) * m]).abs() > 8).sum()
    assert int(bad) == 0


@pytest.mark.parametrize("name", FUSED)
def test_a_rank_that_comes_late(pair, name):
    pair.run(with_delays, name, timeout=120)


# --- CUDA graphs


def block_and_input(name: str, fused: bool) -> tuple[torch.nn.Module, torch.Tensor, GemmBackend]:
    device = device_of_rank()
    backend = make(name)
    torch.manual_seed(3)
    kind = FusedSwiGLU if fused else FeedForward
    block = kind(
        512,
        1024,
        tp_group=dist.group.WORLD,
        tp_gemm_backend=backend,
        device=device,
        dtype=torch.bfloat16,
        sequence_dim=0,
    )
    torch.manual_seed(10 + rank())
    return block, torch.randn(256, 512, device=device, dtype=torch.bfloat16), backend


def graphed(name: str, fused: bool, cut: bool) -> None:
    """Forward and backward in a graph, replayed with new inputs, eager steps of other sizes between."""
    with mock.patch.object(copy_engine, "_TILE", 1 if cut else 1 << 40):
        _graphed(name, fused)


def _graphed(name: str, fused: bool) -> None:
    block, x, backend = block_and_input(name, fused)
    static = x.clone().requires_grad_()
    parameters = list(block.parameters())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(block(static).square().sum(), [static, *parameters])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(static)
        grads = torch.autograd.grad(y.square().sum(), [static, *parameters])
    for step in range(4):
        fresh = torch.randn(
            256, 512, generator=torch.Generator("cuda").manual_seed(50 + 2 * step + rank()), device="cuda"
        )
        with torch.no_grad():
            static.copy_(fresh)
        if step == rank():
            torch.cuda._sleep(SLEEP)
        graph.replay()
        captured = [t.clone() for t in (y, *grads)]
        eager_x = static.detach().clone().requires_grad_()
        eager_y = block(eager_x)
        eager = [eager_y, *torch.autograd.grad(eager_y.square().sum(), [eager_x, *parameters])]
        for got, want in zip(captured, eager, strict=True):
            assert torch.equal(got, want), step
        if step == 1:
            # a larger eager call moves the workspace; the graph goes on with the old one
            before = where_it_works(backend)
            block(torch.randn(rows_beyond(backend), 512, device="cuda", dtype=torch.bfloat16))
            assert where_it_works(backend) != before


def where_it_works(backend: GemmBackend) -> int:
    """Address of the workspace."""
    if isinstance(backend, CopyEngineBackend):
        return backend._workspace.arena.local.data_ptr()
    return get_symm_mem_workspace(dist.group.WORLD.group_name, min_size=0).buffer_ptrs[rank()]


def rows_beyond(backend: GemmBackend) -> int:
    """A block's rows that need more than there is: torch's workspace may have grown in earlier tests."""
    if isinstance(backend, CopyEngineBackend):
        return 4096
    size = get_symm_mem_workspace(dist.group.WORLD.group_name, min_size=0).buffer_size
    return 2 * size // (512 * torch.bfloat16.itemsize)


@pytest.mark.parametrize("name, fused, cut", [
    ("symm_mem", True, False), ("copy_engine", True, False), ("copy_engine", True, True), ("copy_engine", False, True),
])  # fmt: skip
def test_graphs_replay_and_survive_growth(pair, name, fused, cut):
    """C77. Small shapes are captured, a larger eager call moves the workspace, and replays stay right."""
    pair.run(graphed, name, fused, cut, timeout=120)


def capture_too_large(name: str) -> str:
    block, x, _ = block_and_input(name, True)
    with torch.no_grad():
        block(x)
        larger = torch.randn(1 << 14, 512, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(GTPStateError) as error, torch.cuda.graph(graph):
            block(larger)
    return str(error.value)


@pytest.mark.parametrize("name", FUSED)
def test_a_capture_that_would_grow_the_workspace(name):
    """In processes of its own: torch's workspace is the process's, and earlier tests have made it large."""
    pools = RankPools()
    messages = pools(2).run(capture_too_large, name)
    pools.close()
    for message in messages:
        assert "Run forward and backward once at the largest size before the capture" in message


# --- compositions


def checkpointed(name: str) -> None:
    block, x, _ = block_and_input(name, True)
    results = []
    for run in (lambda t: block(t), lambda t: checkpoint(block, t, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        y = run(leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *[p.grad.clone() for p in block.parameters()]])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", FUSED)
def test_activation_checkpointing(pair, name):
    pair.run(checkpointed, name)


def compiled(name: str) -> None:
    block, x, _ = block_and_input(name, True)
    results = []
    for run in (block, torch.compile(block, backend="aot_eager")):
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            y = run(leaf)
            y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *[p.grad.clone() for p in block.parameters()]])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", FUSED)
def test_compiled_block(pair, name):
    """The graph breaks at each collective GEMM, and everything comes out as in eager code."""
    pair.run(compiled, name, timeout=120)


def under_fsdp(name: str) -> None:
    device = device_of_rank()
    mesh = DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    backend = gemm_backend(name, mesh["tp"], device=device)

    def build() -> FusedSwiGLU:
        torch.manual_seed(3)
        return FusedSwiGLU(
            64, 128, tp_group=mesh["tp"], tp_gemm_backend=backend, device=device, dtype=torch.bfloat16, sequence_dim=0
        )

    model, plain = build(), build()
    fully_shard(model, mesh=mesh["dp"])
    model.set_force_sum_reduction_for_comms(True)  # gloo, which serves ranks that share a GPU, has no averages
    for step in range(2):
        inputs = [large(10 * step + 2 * data + rank() % 2, 32, 64) for data in range(2)]
        model.zero_grad()
        plain.zero_grad()
        model(inputs[rank() // 2]).square().sum().backward()
        for x in inputs:
            (plain(x).square().sum() / 2).backward()
        for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            got, want = torch.empty_like(q.grad), q.grad.float()
            dist.all_gather_into_tensor(got, p.grad.to_local().contiguous(), group=mesh["dp"].get_group())
            # the data ranks' sum is rounded to bf16 in both, halved before or after it
            assert float((got.float() - want).abs().max()) <= 2.0**-7 * float(want.abs().max()), n


@pytest.mark.parametrize("name", FUSED)
def test_fsdp2_outside(pools, name):
    """Four ranks: peer copies of activations inside, FSDP2's collectives of weights outside."""
    pools(4).run(under_fsdp, name, timeout=120)


def first_operation(name: str) -> None:
    """The very first operation over a fresh group."""
    device = device_of_rank()
    group = dist.new_group([0, 1])
    backend = gemm_backend(name, group, device=device)
    x = torch.full((4, 16), float(rank() + 1), device=device, dtype=torch.bfloat16)
    y = all_gather_linear(x, torch.ones(8, 16, device=device, dtype=torch.bfloat16), backend=backend)
    want = torch.tensor([16.0] * 4 + [32.0] * 4, device=device, dtype=torch.bfloat16)
    assert torch.equal(y, want[:, None].expand(8, 8))


@pytest.mark.parametrize("name", FUSED)
def test_c79_first_use_of_a_group(pair, name):
    """C79."""
    pair.run(first_operation, name)


def automatic() -> tuple[str, list[bool]]:
    device_of_rank()
    backend = make("auto")
    took = []
    with mock.patch.object(auto, "multiply_then_scatter", wraps=auto.multiply_then_scatter) as by_collective:
        for m in (64, 8192):
            x, w = large(1, m, 4096), large(2, 4096, 4096)
            before = by_collective.call_count
            with torch.no_grad():
                y = linear_reduce_scatter(x, w, backend=backend)
                want = linear_reduce_scatter(x, w, backend=make("collective"))
            took.append(by_collective.call_count > before)
            assert relative(y, want) < 2.0**-7
    return backend.name, took


def test_auto(pair):
    """The copy engine; a collective for a reduce-scatter that is over before the host has queued the copies."""
    assert pair.run(automatic, timeout=90) == [("auto", [True, False])] * 2


def without_sharing() -> str:
    os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    try:
        with pytest.raises(gtp.GTPValueError) as error:
            gemm_backend("copy_engine", dist.group.WORLD, device=torch.device("cuda", 0))
    finally:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return str(error.value)


def test_c79_ranks_that_share_a_gpu_are_refused(pair):
    """C79. The fast path switched off by a setting: an error at set-up that says so."""
    for message in pair.run(without_sharing):
        assert "share a GPU" in message
        assert "Use 'collective'" in message


def multi(name: str) -> None:
    """Several weights of one gather: one rounding per addition in the accumulator, exact with integers."""
    backend = make(name)

    def values(seed: int, *shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()

    x = values(rank(), 64, 32).requires_grad_()
    ws = [values(10 + rank(), 24, 32).requires_grad_(), values(20 + rank(), 16, 32).requires_grad_()]
    ys = all_gather_linear_multi(x, ws, backend=backend)
    whole = torch.cat([values(r, 64, 32) for r in range(2)])
    dys = [values(30 + rank(), 128, 24), values(40 + rank(), 128, 16)]
    torch.autograd.backward(ys, dys)
    for y, w, dy in zip(ys, ws, dys, strict=True):
        assert torch.equal(y, F.linear(whole, w))
        assert torch.equal(w.grad, dy.t() @ whole)
    total = sum(
        values(30 + r, 128, 24) @ values(10 + r, 24, 32) + values(40 + r, 128, 16) @ values(20 + r, 16, 32)
        for r in range(2)
    )
    assert torch.equal(x.grad, total[64 * rank() : 64 * (rank() + 1)])


@pytest.mark.parametrize("name", FUSED)
def test_several_weights(pair, name):
    pair.run(multi, name)


# --- a small Llama: ten steps by every backend, and TP x GTP


def curve(name: str, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    device = device_of_rank()
    torch.manual_seed(11)
    tp = {"tp_group": dist.group.WORLD, "tp_gemm_backend": make(name)} if name != "stock" else {}
    # drawn in bf16 whatever the dtype: one starting point
    model = Llama(vocab=128, dim=256, heads=8, kv_heads=4, hidden=512, layers=3, dtype=torch.bfloat16, **tp)
    model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(10):
        ids, targets = (t.to(device) for t in batch(step % 2, vocab=128, sequence=128))
        loss = model.loss(ids, targets)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_ten_steps_of_a_llama_by_every_backend(pair):
    """bf16, fp64 as judge. The stock model rounds a whole product once, a sum over ranks each rank's part as well (see
    above), so losses drift apart by a few roundoffs; no backend is farther from fp64 than the stock model by more than
    those."""
    judge = pair.run(curve, "stock", torch.float64, timeout=120)[0]
    assert judge[-1] < judge[0]
    curves = {name: pair.run(curve, name, timeout=120) for name in ("stock", *EVERY)}
    off = {name: max(abs(a - b) / b for a, b in zip(c[0], judge, strict=True)) for name, c in curves.items()}
    for name in EVERY:
        assert curves[name][0] == curves[name][1], name  # the same loss on both ranks
        assert off[name] < 2 * off["stock"] + 2e-3, off


def tp_times_gtp(name: str, transport: str) -> None:
    device = device_of_rank()
    groups = [subgroup(members) for members in ((0, 1), (2, 3), (0, 2), (1, 3))]
    tp, weights = groups[rank() // 2], groups[2 + rank() % 2]
    backend = gemm_backend(name, tp, device=device)

    def build() -> Llama:
        torch.manual_seed(11)
        sizes = {"vocab": 128, "dim": 256, "heads": 8, "kv_heads": 4, "hidden": 512, "layers": 3}
        return Llama(**sizes, tp_group=tp, tp_gemm_backend=backend, device=device, dtype=torch.float32)

    model, plain = build(), build()
    gtp.shard_model(model, weights, config=gtp.GTPConfig(transport=transport))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        batches = [tuple(t.to(device) for t in batch(2 * step + d, vocab=128, sequence=64)) for d in range(2)]
        if step == rank():
            torch.cuda._sleep(SLEEP)
        model.loss(*batches[weights.rank()]).backward()
        for one in batches:
            (plain.loss(*one) / 2).backward()
        for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            # the addition over data ranks is the same in both; kernels may split their reductions differently per call
            torch.testing.assert_close(full_grad(p), q.grad, rtol=1e-4, atol=1e-5, msg=n)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name, transport", [
    ("collective", "process_group"), ("copy_engine", "process_group"), ("copy_engine", "copy_engine"),
    ("symm_mem", "copy_engine"),
])  # fmt: skip
def test_tp_times_gtp(pools, name, transport):
    """Four ranks: peer copies of activations over one axis, of weights over the other, under the same GEMMs."""
    pools(4).run(tp_times_gtp, name, transport, timeout=150)


def overlap() -> float:
    """Share of the copies that ran while a GEMM did, from a trace of this rank's GPU.

    The device starts behind the host: what is looked at is the order that streams allow, and not how fast Python is.
    """
    device = device_of_rank()
    backend = make("copy_engine")
    x, w = large(1, 2048, 4096), large(2, 4096, 4096)

    def steps() -> None:
        dist.barrier()
        torch.cuda._sleep(20 * SLEEP)
        for _ in range(5):
            all_gather_linear(x, w, backend=backend)
        torch.cuda.synchronize(device)

    with torch.no_grad():
        steps()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            steps()
    spans: dict[str, list[tuple[float, float]]] = {"copy": [], "gemm": []}
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        if "PtoP" in event.name:
            spans["copy"].append(span)
        elif "nvjet" in event.name or "gemm" in event.name:
            spans["gemm"].append(span)
    assert (len(spans["copy"]), len(spans["gemm"])) == (5, 10), [e.name for e in profile.events()]
    total = sum(end - start for start, end in spans["copy"])
    hidden = sum(
        max(0.0, min(end, stop) - max(start, begin)) for start, end in spans["copy"] for begin, stop in spans["gemm"]
    )
    return hidden / total


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="overlap over NVLink needs two GPUs")
def test_copies_run_under_the_gemm(pair):
    assert min(pair.run(overlap)) > 0.5


# --- a rank that does not come


def left_alone(in_a_graph: bool) -> str:
    device = device_of_rank()
    backend = gemm_backend("copy_engine", dist.group.WORLD, device=device, peer_timeout=2.0)
    x, w = large(1, 64, 128), large(2, 96, 128)
    run = torch.no_grad()(lambda: all_gather_linear(x, w, backend=backend))
    run()
    torch.cuda.synchronize()
    time.sleep(4)  # a pause is not a wait
    run()
    torch.cuda.synchronize()
    call: Callable[[], object] = run
    if in_a_graph:
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        call = graph.replay
    if rank() == 1:
        time.sleep(10)  # never comes
        return ""
    begin = time.monotonic()
    call()
    torch.cuda.synchronize()  # returns because the watchdog lets the streams run out
    took = time.monotonic() - begin
    assert 1.5 < took < 8, took
    with pytest.raises(PeerError) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize("in_a_graph", [False, True], ids=["eager", "graph"])
def test_a_rank_that_does_not_come_is_named(in_a_graph):
    """Within the time set, and without it: the host is not left in a synchronization for ever."""
    pools = RankPools()
    message, _ = pools(2).run(left_alone, in_a_graph, timeout=60)
    pools.close()
    assert "has waited 2 s for rank 1 of group" in message
    assert "to send its part of a collective GEMM" in message
    assert "gemm_backend(peer_timeout=...)" in message

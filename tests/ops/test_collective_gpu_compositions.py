"""The collective GEMMs on real streams under what people put around them, every backend. One GPU is enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import get_symm_mem_workspace
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gtp
from gtp.errors import GTPStateError, PeerError
from gtp.modules import FeedForward, FusedSwiGLU
from gtp.ops import GemmBackend, all_gather_linear, gemm_backend
from gtp.ops.collective_backends import copy_engine
from gtp.ops.collective_backends.copy_engine import CopyEngineBackend
from gtp.testing.ranks import rank, subgroup
from tests.modules.llama import Llama, batch
from tests.ops.collective_gpu import EVERY, FUSED, SLEEP, device_of_rank, large, make
from tests.ops.copy_engine_ranks import sizes
from tests.reference import full_grad

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


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
    # eager code that cuts no more than the graph does would not give its bits
    with sizes(split=cut), mock.patch.object(copy_engine, "_EAGER_FLOP", 0.0):
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
def test_a_capture_that_would_grow_the_workspace(fresh_pools, name):
    """In processes of its own: torch's workspace is the process's, and earlier tests have made it large."""
    for message in fresh_pools(2).run(capture_too_large, name):
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
def test_a_rank_that_does_not_come_is_named(fresh_pools, in_a_graph):
    """Within the time set, and without it: the host is not left in a synchronization for ever."""
    message, _ = fresh_pools(2).run(left_alone, in_a_graph, timeout=60)
    assert "has waited 2 s for rank 1 of group" in message
    assert "to send its part of a collective GEMM" in message
    assert "gemm_backend(peer_timeout=...)" in message

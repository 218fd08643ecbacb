"""The addition kernel: through Triton's interpreter on the CPU, and compiled on a GPU. Same cases, exact in both."""

from __future__ import annotations

import itertools
import json
import pathlib
from importlib.util import find_spec

import pytest
import torch

from tests.processes import Ended

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def reference(
    into: torch.Tensor, parts: list[torch.Tensor], divisor: int, accumulate: bool, wide: torch.dtype
) -> torch.Tensor:
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    total /= torch.full_like(total, divisor)  # by a Python number, CUDA would multiply by its reciprocal
    if accumulate:
        total += into.to(wide)
    return total.to(into.dtype)


def interpreted_cases() -> int:
    """Runs in a process with TRITON_INTERPRET=1. Returns the number of cases."""
    import triton.language as tl

    from gtp.ops.kernels.fused_add import fused_add_kernel

    torch.manual_seed(0)
    cases = 0
    for size, accumulate, divisor, into_dtype in itertools.product((1, 2, 3), (False, True), (1, 2, 3), DTYPES):
        for rank in range(size):
            count, stride = 1000, 1008
            own = torch.randn(count).to(torch.bfloat16)
            received = torch.randn(max(size - 1, 1), stride).to(torch.bfloat16)
            into = torch.randn(count).to(into_dtype)
            parts = [own if r == rank else received[r - (r > rank), :count] for r in range(size)]
            wanted = reference(into, parts, divisor, accumulate, torch.float32)
            constants = (rank, size, accumulate, divisor == 2, divisor == 3, tl.float32, True, 256, 0)
            factor = 0.5 if divisor == 2 else float(divisor)
            fused_add_kernel[(3,)](into, own, received, stride, count, factor, *constants)
            # NumPy casts to bf16 by cutting off, so the interpreter may be one unit in the last place low there
            exact = into_dtype != torch.bfloat16
            near = torch.allclose(into.float(), wanted.float(), rtol=0 if exact else 2**-7, atol=0)
            assert near, (size, rank, accumulate, divisor, into_dtype)
            cases += 1
    return cases


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.process(
    "-c",
    "from tests.ops.test_kernels import interpreted_cases; print(interpreted_cases())",
    env={"TRITON_INTERPRET": "1"},
)
def test_the_kernel_in_the_interpreter(process: Ended) -> None:
    assert int(process.stdout) == 108


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size, rank, wire, into_dtype",
    [
        (1, 0, torch.float32, torch.bfloat16),
        (2, 0, torch.bfloat16, torch.bfloat16),
        (2, 1, torch.bfloat16, torch.float32),
        (2, 1, torch.float16, torch.float16),
        (3, 1, torch.float32, torch.float32),
        (8, 5, torch.bfloat16, torch.float32),
    ],
)
def test_the_kernel_compiled(size: int, rank: int, wire: torch.dtype, into_dtype: torch.dtype) -> None:
    from gtp.ops.kernels.fused_add import FusedAdd

    torch.manual_seed(0)
    add = FusedAdd(rank, size, programs=7)
    stream = torch.cuda.current_stream().cuda_stream
    for count, divisor, accumulate in itertools.product((16, 1000, 4096 * 133, 1_000_003), (1, 3), (False, True)):
        stride = count + 32
        own = torch.randn(count, device="cuda").to(wire)
        received = torch.randn(max(size - 1, 1), stride, device="cuda").to(wire)
        into = torch.randn(count + 24, device="cuda").to(into_dtype)
        before = into.clone()
        parts = [own if r == rank else received[r - (r > rank), :count] for r in range(size)]
        wanted = reference(into[8 : count + 8], parts, divisor, accumulate, torch.float32)
        add(into, 8, own.data_ptr(), received.data_ptr(), stride, count, wire, divisor, accumulate, stream)
        assert torch.equal(into[8 : count + 8], wanted), (count, divisor, accumulate)
        assert torch.equal(into[:8], before[:8])
        assert torch.equal(into[count + 8 :], before[count + 8 :])


@pytest.mark.gpu
def test_fp64_is_added_in_fp64() -> None:
    from gtp.ops.kernels.fused_add import FusedAdd

    own = torch.randn(1000, device="cuda", dtype=torch.float64)
    other = torch.randn(1000, device="cuda", dtype=torch.float64)
    into = torch.zeros(1000, device="cuda", dtype=torch.float64)
    stream = torch.cuda.current_stream().cuda_stream
    FusedAdd(0, 2, programs=4)(into, 0, own.data_ptr(), other.data_ptr(), 1000, 1000, torch.float64, 3, False, stream)
    assert torch.equal(into, (own + other) / torch.full_like(own, 3))


@pytest.mark.gpu
def test_no_more_programs_than_allowed(tmp_path: pathlib.Path) -> None:
    """The bound on SMs is the bound on programs: a program runs on one SM."""
    from gtp.ops.kernels.fused_add import FusedAdd

    add = FusedAdd(0, 2, programs=5)
    n = 1 << 22
    own, other, into = (torch.randn(n, device="cuda") for _ in range(3))
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (own.data_ptr(), other.data_ptr(), n, n, torch.float32, 1, False, stream)
    add(into, 0, *arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        add(into, 0, *arguments)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (kernel,) = [e for e in events if "fused_add" in e.get("name", "") and e.get("cat") == "kernel"]
    assert kernel["args"]["grid"] == [5, 1, 1]
    assert torch.equal(into, own + other)


def ring_and_ours(parts: torch.Tensor) -> tuple[float, float, float]:
    """Errors against fp64 of a ring that rounds at every hop, of one rounding at the end, and the least possible."""
    exact = parts.double().sum(0)
    ring, total = parts[0].clone(), parts[0].float()
    for part in parts[1:]:
        ring += part
        total += part
    errors = [(x.double() - exact).norm().item() for x in (ring, total.bfloat16(), exact.bfloat16())]
    return errors[0], errors[1], errors[2]


@pytest.mark.parametrize("size", [2, 8])
def test_adding_in_fp32_is_no_worse_than_a_ring(size: int) -> None:
    torch.manual_seed(0)
    ring, ours, least = ring_and_ours(torch.randn(size, 1 << 16).bfloat16())
    assert ours <= least * 1.001  # fp32 sums of a few bf16 values are all but exact before they are rounded
    assert ours <= ring
    if size == 8:
        assert ours < ring / 1.5  # what the test would see if it were the ring


@pytest.mark.gpu
def test_sums_over_eight_ranks_are_better_than_a_ring_in_bf16() -> None:
    from gtp.ops.kernels.fused_add import FusedAdd

    torch.manual_seed(0)
    n = 1 << 16
    parts = torch.randn(8, n, device="cuda").bfloat16()
    into = torch.empty(n, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.current_stream().cuda_stream
    FusedAdd(0, 8, programs=16)(
        into, 0, parts[0].data_ptr(), parts[1].data_ptr(), n, n, torch.bfloat16, 1, False, stream
    )
    ours = (into.double() - parts.double().sum(0)).norm().item()
    ring, emulated, _ = ring_and_ours(parts)
    assert ours == emulated
    assert ours < ring / 1.5

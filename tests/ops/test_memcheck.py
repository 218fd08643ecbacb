"""compute-sanitizer's memcheck over the Triton kernels: no access outside of tensors, at odd sizes and strides."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]

ERROR = 86  # the exit status that the sanitizer is told to give for a bad access


def additions(beyond: int = 0) -> None:
    """`beyond`: elements more than there are, for the control."""
    from gtp.ops.kernels.fused_add import FusedAdd

    stream = torch.cuda.current_stream().cuda_stream
    for size, wire, into_dtype in (
        (1, torch.bfloat16, torch.float32),
        (2, torch.bfloat16, torch.bfloat16),
        (3, torch.float16, torch.float32),
        (8, torch.float32, torch.float32),
    ):
        add = FusedAdd(size - 1, size, programs=3)
        for count, divisor, accumulate in itertools.product((8, 1000, 8192 * 3 + 24), (1, 3), (False, True)):
            own = torch.randn(count, device="cuda").to(wire)
            received = torch.randn(max(size - 1, 1), count, device="cuda").to(wire)
            into = torch.randn(count, device="cuda").to(into_dtype)
            arguments = (count, count + beyond, wire, divisor, accumulate, stream)
            add(into, 0, own.data_ptr(), received.data_ptr(), *arguments)
    torch.cuda.synchronize()


def activations() -> None:
    from gtp.ops import silu_and_mul, silu_and_mul_halves, silu_and_mul_pairs

    limit = torch.tensor(3, device="cuda")
    for rows, columns, dtype in itertools.product((1, 7), (8, 1000, 1029), (torch.bfloat16, torch.float32)):
        packed = torch.randn(rows, 2 * columns, device="cuda").to(dtype).requires_grad_()
        for y in (
            silu_and_mul_halves(packed),
            silu_and_mul_pairs(packed.view(rows, columns, 2)),
            silu_and_mul(packed[:, :columns], packed[:, columns:], num_rows=limit),
            silu_and_mul(packed[:, ::2], packed[:, 1::2], num_rows=5),
        ):
            y.backward(torch.randn_like(y))
    torch.cuda.synchronize()


def memcheck(call: str) -> subprocess.CompletedProcess[str]:
    """Runs `call`, an expression of this module, in a process of its own under the sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    # tensors get memory of their own: a bad access inside the allocator's larger pieces would be none to the sanitizer
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = f"from tests.ops import test_memcheck; test_memcheck.{call}; print('ran to its end')"
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(ERROR), sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    if "Device not supported" in ended.stdout + ended.stderr:
        pytest.skip("compute-sanitizer does not support this device or its runtime")
    return ended


@pytest.mark.parametrize("call", ["additions()", "activations()"])
def test_no_access_outside_of_tensors(call):
    ended = memcheck(call)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "ran to its end" in ended.stdout
    assert "ERROR SUMMARY: 0 errors" in ended.stdout + ended.stderr


def test_the_sanitizer_sees_an_access_outside():
    ended = memcheck("additions(beyond=4096)")
    assert ended.returncode == ERROR
    assert "Invalid __global__" in ended.stdout + ended.stderr

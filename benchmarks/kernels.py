"""The addition kernel against a device-to-device copy, and what the driver calls of a gather cost the host. One GPU.

    python -m benchmarks.kernels

Bandwidth counts bytes read and written. `ratio` is the share of the copy's bandwidth. A second table adds a GEMM beside
the kernel: what the addition takes from it, by the number of SMs it may use.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common
from gtp.ops.kernels.fused_add import BLOCK, WARPS, FusedAdd
from gtp.ops.peer import CudaDriver, Wait, Write


def bandwidth(args: argparse.Namespace) -> list[dict[str, Any]]:
    """fp32 accumulation of two ranks' bf16 contributions, into bf16 and fp32."""
    numel = (1 << 18) if args.tiny else 58_720_256  # 117 MB of bf16: half of a 4096 x 28672 weight
    stream = torch.cuda.current_stream().cuda_stream
    own, other = (torch.randn(numel, device="cuda").bfloat16() for _ in range(2))
    source, target = (torch.empty(numel * 4, dtype=torch.uint8, device="cuda") for _ in range(2))
    bytes_of: dict[str, int] = {"copy": 2 * source.numel()}
    variants: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for sms in (8, 16, 32, 44, 64, 132):
        for block, warps in ((16384, 32), (8192, 32), (8192, 16), (4096, 16)):
            if args.quick and (block, warps) != (BLOCK, WARPS):
                continue
            for dtype, accumulate in ((torch.bfloat16, False), (torch.float32, True)):
                into = torch.zeros(numel, dtype=dtype, device="cuda")
                add = FusedAdd(0, 2, sms, block=block, warps=warps)
                name = f"add into {str(dtype)[6:]}{', accumulating' * accumulate}, {sms} SMs, block {block}/{warps}"
                bytes_of[name] = numel * (4 + into.element_size() * (2 if accumulate else 1))
                variants[name] = lambda add=add, into=into, accumulate=accumulate: add(
                    into, 0, own.data_ptr(), other.data_ptr(), numel, numel, torch.bfloat16, 2, accumulate, stream
                )
    timings = common.interleave(variants, torch.device("cuda"), rounds=5 if args.quick else 15, iterations=4)
    rows = common.rows_of("bandwidth", "eager", timings, reference="copy")
    for row in rows:
        row["gb_per_s"] = round(bytes_of[row["impl"]] / row["ms"] / 1e6, 1)
    for row in rows:
        row["ratio"] = common.significant(row["gb_per_s"] / rows[0]["gb_per_s"])
    print(common.table(rows, ["impl", "ms", "gb_per_s", "ratio"]))
    return rows


def beside_a_gemm(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Slowdown of a GEMM while additions, or local copies, run on another stream all the time."""
    m = 512 if args.tiny else 4096
    a = torch.randn(m, 4096, device="cuda").bfloat16()
    b = torch.randn(4096, 14336, device="cuda").bfloat16()
    out = torch.empty(m, 14336, device="cuda", dtype=torch.bfloat16)
    numel = 8 << 20
    own, other = (torch.randn(numel, device="cuda").bfloat16() for _ in range(2))
    into = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    driver = CudaDriver(torch.device("cuda", 0))
    side = driver.new_stream()

    def gemm() -> None:
        torch.mm(a, b, out=out)

    def add(sms: int) -> Callable[[], None]:
        kernel = FusedAdd(0, 2, sms)
        return lambda: kernel(into, 0, own.data_ptr(), other.data_ptr(), numel, numel, torch.bfloat16, 2, False, side)

    def copy() -> None:
        driver.copy(into.data_ptr(), own.data_ptr(), 2 * numel, side)

    event = driver.new_event()

    def both(work: Callable[[], None], times: int) -> Callable[[], None]:
        def step() -> None:
            current = driver.current_stream()
            driver.record(event, current)
            driver.wait_event(side, event)
            for _ in range(times):
                work()
            for _ in range(4):
                gemm()

        return step

    def alone() -> None:
        for _ in range(4):
            gemm()

    variants: dict[str, Callable[[], object]] = {"GEMM alone": alone}
    variants |= {f"GEMM beside additions on {sms} SMs": both(add(sms), 40) for sms in (8, 16, 32, 44, 132)}
    variants["GEMM beside local copies"] = both(copy, 60)
    timings = common.interleave(variants, torch.device("cuda"), rounds=5 if args.quick else 15)
    rows = common.rows_of("beside", "eager", timings, reference="GEMM alone")
    print(common.table(rows, ["impl", "ms", "ms_min", "ms_max", "ratio"]))
    return rows


def host_calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of host time per call, from an idle queue."""
    device = torch.device("cuda", 0)
    driver = CudaDriver(device)
    side = driver.new_stream()
    torch_side = torch.cuda.ExternalStream(side)
    event, torch_event = driver.new_event(), torch.cuda.Event()
    a, b = (torch.zeros(1 << 16, dtype=torch.uint8, device=device) for _ in range(2))
    words = torch.zeros(64, dtype=torch.int32, device=device)
    base = words.data_ptr()
    one = driver.batch([Write(base, 1)])
    four = driver.batch([Write(base, 1), Wait(base, 1), Write(base, 0), Write(base + 4, 0)])
    own, into = torch.zeros(1 << 14, dtype=torch.bfloat16, device=device), torch.zeros(1 << 14, device=device)
    add = FusedAdd(0, 2, 16)

    def torch_copy() -> None:
        with torch.cuda.stream(torch_side):
            b.copy_(a, non_blocking=True)

    calls: dict[str, Callable[[], object]] = {
        "copy, driver call": lambda: driver.copy(b.data_ptr(), a.data_ptr(), 1 << 16, side),
        "copy, stream context and Tensor.copy_": torch_copy,
        "record, driver call": lambda: driver.record(event, side),
        "record, torch.cuda.Event": lambda: torch_event.record(torch_side),
        "wait, driver call": lambda: driver.wait_event(side, event),
        "wait, torch.cuda.Event": lambda: torch_event.wait(torch_side),
        "current stream, raw": driver.current_stream,
        "current stream, torch": torch.cuda.current_stream,
        "capture()": driver.capture,
        "batch of 1 signal operation": lambda: driver.submit(one, side),
        "batch of 4 signal operations": lambda: driver.submit(four, side),
        "addition kernel": lambda: add(
            into, 0, own.data_ptr(), own.data_ptr(), 1 << 14, 1 << 14, torch.bfloat16, 2, False, side
        ),
    }
    calls |= _bindings(driver, side, a, b)
    rows = []
    for name, call in calls.items():
        samples = []
        call()
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            samples.append((time.perf_counter() - start) * 1e4)
        us = statistics.median(samples)
        rows.append({"case": "host", "impl": name, "mode": "eager", "ms": us / 1e3, "us": round(us, 3)})
    print(common.table(rows, ["impl", "us"]))
    return rows


def _bindings(driver: CudaDriver, side: int, a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The same copy through cuda.bindings, where it is installed."""
    try:
        from cuda.bindings import driver as cuda
    except ImportError:
        return {}
    stream = cuda.CUstream(side)
    target, source = cuda.CUdeviceptr(b.data_ptr()), cuda.CUdeviceptr(a.data_ptr())
    return {"copy, cuda.bindings": lambda: cuda.cuMemcpyDtoDAsync(target, source, 1 << 16, stream)}


def main() -> None:
    args = common.parser(__doc__ or "").parse_args()
    device = torch.device("cuda", 0)
    rows = []
    for name, part in {"host": host_calls, "bandwidth": bandwidth, "beside": beside_a_gemm}.items():
        if common.wanted(name, args.cases):
            rows += part(args)
    common.write("kernels", device, rows, args)


if __name__ == "__main__":
    main()

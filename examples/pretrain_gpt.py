"""Trains a small Megatron-Core GPT on real text twice, unsharded and with its weights sharded by gtp, and compares.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py                 # two CPU cores, or two GPUs where they are
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --steps 400 --data my_text/ --sizes layers=8,hidden=256,heads=8
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --gtp 2

Both runs start from the same seed and see the same bytes. In fp32 on two ranks the losses must be identical; the script
exits with an error when they are not. It prints a table and writes plots to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import warnings
from pathlib import Path

# Megatron warns about what this machine lacks (Apex, Transformer Engine, CUDA) and about its own plans
warnings.filterwarnings("ignore", module="megatron")
for _name in ("torch.utils.cpp_extension", "megatron.core"):
    logging.getLogger(_name).setLevel(logging.ERROR)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main() -> int:
    args = _arguments()
    on_gpu = _device_setup()
    # after the visible devices are settled: Megatron looks for them while it is imported
    from gpt_demo import data, plots, report
    from gpt_demo.settings import Layout, Options, Sizes
    from gpt_demo.training import run

    import gtp.megatron
    from gtp.testing.megatron_cpu import megatron_on_cpu

    rank, world = dist.get_rank(), dist.get_world_size()
    gtp_size = args.gtp or world // args.tp
    sizes = dataclasses.replace(Sizes(), **args.sizes)
    options = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})
    corpus = data.load(args.data, seq=sizes.seq)
    gtp.megatron.install()
    results = []
    with contextlib.nullcontext() if on_gpu else megatron_on_cpu():
        for layout in (Layout("unsharded", args.tp, 1), Layout(f"GTP={gtp_size}", args.tp, gtp_size)):
            progress = report.Progress(layout.name, args.steps, show=rank == 0)
            save = args.save if layout.gtp > 1 else None
            results.append(run(layout, sizes, options, corpus, progress, save))
            progress.close()
    plain, sharded = results
    problems = report.verdict(plain, sharded, options)
    if rank == 0:
        print("\n" + report.table(plain, sharded, corpus.source) + "\n")
        for path in plots.save(plain, sharded, args.out):
            print(f"plot: {path}")
        if args.save is not None:
            print(f"checkpoint: {args.save}")
        print("\n".join(f"FAILED: {p}" for p in problems) or report.PASSED)
    dist.destroy_process_group()
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=80, help="training steps of each run (default 80)")
    add("--gtp", type=int, default=None, help="ranks that weights are sharded over (default: world / tp)")
    add("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    add("--bf16", action="store_true", help="bf16 weights with fp32 master copies")
    add("--sizes", type=_sizes, default={}, metavar="NAME=VALUE,...", help="layers, hidden, heads, seq, batch, lr")
    add("--moe", type=int, default=0, metavar="N", help="N experts in every layer")
    add("--mtp", type=int, default=0, metavar="N", help="N more layers that predict further tokens")
    add("--recompute", action="store_true", help="recompute activations in backward")
    add("--distributed-optimizer", action="store_true", help="Megatron's DistributedOptimizer; on gloo it may crash")
    add("--save", type=Path, default=None, help="folder for a checkpoint of the sharded run")
    add("--load", type=Path, default=None, help="folder of a checkpoint that both runs start from")
    add("--data", type=Path, default=None, help="file or folder of text (default: Python's standard library)")
    add("--out", type=Path, default=Path("demo_output"), help="folder for the plots (default demo_output)")
    add("--seed", type=int, default=1234, help="of the initial weights and of the batches (default 1234)")
    return parser.parse_args()


def _sizes(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("layers", "hidden", "heads", "seq", "batch", "lr") or not value:
            raise argparse.ArgumentTypeError(f"{part!r}: write name=value with layers, hidden, heads, seq, batch or lr")
        values[name] = float(value) if name == "lr" else int(value)
    return values


def _device_setup() -> bool:
    """NCCL with one GPU per local rank where there are enough, else gloo on the CPU. Returns whether it is GPUs."""
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 2 examples/pretrain_gpt.py")
    local, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        return True
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(max(torch.get_num_threads() // local_world, 1))
    dist.init_process_group("gloo")
    return False


if __name__ == "__main__":
    sys.exit(main())

"""A long run with delays at random: values equal to the unsharded run's, no hang, memory flat; and loss curves.

    python -m benchmarks.soak                    one rank per GPU, 1000 steps
    python -m benchmarks.soak --device cpu --tiny

Part 1, `--steps`: an fp32 model of three blocks trains sharded and, whole, by data parallelism. At random
steps a random rank sleeps before forward, between forward and backward, or before the optimizer. Every 50 steps the
gathered weights are compared. Part 2, `--curve`: losses of a bf16 stack over 200 steps, data parallelism beside gtp.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gtp
from benchmarks import common


class Mixer(nn.Module):
    """Embedding, blocks of norm and two linears, head: no attention, whose backward is not deterministic."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(x)


def text(vocab: int, device: torch.device, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in which the next one follows from the present one nine times out of ten: something to learn."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    ids = torch.randint(vocab, (8, 65), generator=generator)
    follow = torch.rand(8, 64, generator=generator) < 0.9
    for column in range(64):
        ids[:, column + 1] = torch.where(follow[:, column], (ids[:, column] * 7 + 3) % vocab, ids[:, column + 1])
    return ids[:, :-1].to(device), ids[:, 1:].to(device)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        total = parameter.grad.float()
        dist.all_reduce(total)
        parameter.grad.copy_(total / dist.get_world_size())


def pair(vocab: int, width: int, device: torch.device, dtype: torch.dtype, transport: Any) -> Any:
    torch.manual_seed(11)
    plain = Mixer(vocab, width, 3).to(device=device, dtype=dtype)
    sharded = Mixer(vocab, width, 3).to(device=device, dtype=dtype)
    sharded.load_state_dict(plain.state_dict())
    runtime = gtp.shard_model(sharded, dist.group.WORLD, config=gtp.GTPConfig(transport=transport))
    return plain, sharded, runtime


def soak(device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Part 1. Returns the worst difference of a weight and the memory over time."""
    vocab, width = (64, 32) if args.tiny else (512, 512)
    plain, sharded, runtime = pair(vocab, width, device, torch.float32, "auto")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, sharded)]
    world, rank = dist.get_world_size(), dist.get_rank()
    delays = random.Random(5)
    worst, memory, slept = 0.0, [], 0
    for step in range(args.steps):
        late, where = delays.randrange(world), delays.choice(["forward", "backward", "optimizer", "", "", ""])
        slept += bool(where)

        def pause(here: str, late: int = late, where: str = where) -> None:
            if here == where and late == rank:
                if device.type == "cuda":
                    torch.cuda._sleep(int(4e6))
                else:
                    time.sleep(0.002)

        batch = text(vocab, device, step, rank)
        loss_of(plain, batch).backward()
        average_gradients(plain)
        pause("forward")
        loss = loss_of(sharded, batch)
        pause("backward")
        loss.backward()
        pause("optimizer")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 49 or step == args.steps - 1:
            reference = dict(plain.named_parameters())
            for name, parameter in sharded.named_parameters():
                value = parameter.full_tensor() if isinstance(parameter, gtp.GTPWeight) else parameter.detach()
                worst = max(worst, (value - reference[name].detach()).abs().max().item())
            if device.type == "cuda":
                memory.append(torch.cuda.memory_allocated(device))
    stats = runtime.stats()
    common.say(f"{args.steps} steps, {slept} with a late rank: weights differ by at most {worst:.3e}; {stats}")
    return {
        "case": f"{args.steps} steps, {slept} delayed",
        "impl": f"gtp {stats.transport}",
        "mode": "fp32",
        "max_difference": worst,
        "hit_rate": stats.hit_rate,
        "memory_first": memory[1] if len(memory) > 1 else None,
        "memory_last": memory[-1] if memory else None,
    }


def curve(device: torch.device, args: argparse.Namespace) -> dict[str, list[float]]:
    """Part 2: losses averaged over ranks."""
    vocab, width = (64, 32) if args.tiny else (512, 1024)
    plain, sharded, _ = pair(vocab, width, device, torch.bfloat16, "auto")
    losses: dict[str, list[float]] = {"data parallelism": [], "gtp": []}
    for name, model in (("data parallelism", plain), ("gtp", sharded)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(args.curve):
            loss = loss_of(model, text(vocab, device, step, dist.get_rank()))
            loss.backward()
            if model is plain:
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[name].append(float(mean) / dist.get_world_size())
    return losses


def run(device: torch.device, args: argparse.Namespace) -> None:
    row = soak(device, args)
    losses = curve(device, args)
    gaps = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    common.say(f"loss curves over {args.curve} steps differ by at most {max(gaps):.4f}, at the end {gaps[-1]:.4f}")
    if common.is_main():
        out = args.out or common.RESULTS / "soak.json"
        common.plot_losses(losses, out.with_suffix(".png"), "bf16, same seed and data")
    common.write("soak", device, [row], args, losses=losses, largest_gap=max(gaps))


def main() -> None:
    parser = common.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--curve", type=int, default=200)
    common.launch(run, parser.parse_args())


if __name__ == "__main__":
    main()

"""A Hugging Face Llama, which never heard of gtp, sharded. Start with:

torchrun --nproc-per-node 2 examples/shard_any_model.py
"""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import gtp


def train(model: torch.nn.Module, device: torch.device, steps: int = 5) -> list[float]:
    """AdamW on random tokens, other ones on each rank; the loss of each step, averaged over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        tokens = torch.randint(512, (2, 32), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def main() -> None:
    enough_gpus = torch.cuda.device_count() >= dist.get_world_size()
    device = torch.device("cuda", dist.get_rank()) if enough_gpus else torch.device("cpu")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).to(device)
    sharded = copy.deepcopy(plain)
    runtime = gtp.shard_model(sharded, dist.group.WORLD)  # the ten lines are one

    expected, losses = train(DistributedDataParallel(plain), device), train(sharded, device)
    if dist.get_rank() == 0:
        print(runtime.report.summary())
        print("unsharded", expected, "\nsharded  ", losses, "\nequal" if losses == expected else "\ndifferent")


dist.init_process_group()
main()
dist.barrier()
dist.destroy_process_group()

"""Ten lines of plain torch. Start with: torchrun --nproc-per-node 2 examples/plain_torch.py"""

import torch
import torch.distributed as dist

import gtp

dist.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
runtime = gtp.shard_model(model, dist.group.WORLD)  # each rank holds its rows of every weight
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for _ in range(10):
    x = torch.randn(8, 64)
    (model(x) - x).square().mean().backward()  # gathers, reduces, averages over ranks
    gtp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(runtime.report)
    print(f"{runtime.stats().hit_rate:.0%} of the weights were there when they were needed")
dist.destroy_process_group()

"""The models of the step benchmark: a llama-like stack and a mixture of experts, plain torch modules for everybody."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from gtp.modules import GroupedLinear


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Widths of a stack."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    experts: int = 0  # 0: dense
    top_k: int = 2


LLAMA = Sizes(layers=8, hidden=4096, ffn=14336, heads=32, kv_heads=8)  # 218 M parameters a layer
MOE = Sizes(layers=8, hidden=2048, ffn=2816, heads=16, kv_heads=4, experts=8)
TINY = Sizes(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2)
TINY_MOE = Sizes(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, experts=4)


class Attention(nn.Module):
    """Causal self-attention over one sequence, grouped queries, one projection for queries, keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.head_dim = sizes.hidden // sizes.heads
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(1, x.shape[0], -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(x.shape[0], -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Experts(nn.Module):
    """SwiGLU experts. Tokens are routed evenly and at random, once: the router is not what is measured."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.gate_up = GroupedLinear(sizes.experts, sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down = GroupedLinear(sizes.experts, sizes.ffn, sizes.hidden, bias=False)
        self._routes: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, k = x.shape[0], self.sizes.top_k
        route = self._routes.get(tokens)
        if route is None:
            generator = torch.Generator().manual_seed(tokens)
            route = torch.cat([torch.randperm(tokens, generator=generator) for _ in range(k)]).to(x.device)
            self._routes[tokens] = route
        splits = [tokens * k // self.sizes.experts] * self.sizes.experts
        gate, up = self.gate_up(x[route], splits).chunk(2, dim=-1)
        y = self.down(functional.silu(gate) * up, splits)
        return torch.zeros_like(x).index_add(0, route, y) / k


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.ffn = Experts(sizes) if sizes.experts else FeedForward(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Stack(nn.Module):
    """Blocks over hidden states `[tokens, hidden]`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_stack(sizes: Sizes, device: torch.device) -> Stack:
    """The same random weights on every rank: bf16 on CUDA, fp32 on the CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return Stack(sizes).to(torch.bfloat16 if device.type == "cuda" else torch.float32)

"""A small Llama over the tensor-parallel modules; with no group, the same model on the stock path."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gtp.modules import (
    FusedQKVLinear,
    RowParallelLinear,
    sum_gradients_over_tp,
    swiglu_feed_forward,
)
from gtp.ops import gather_sequence, split_sequence


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, fused: bool, options: dict[str, Any]) -> None:
        super().__init__()
        made = {k: options[k] for k in ("device", "dtype")}
        self.norm1, self.norm2 = nn.RMSNorm(dim, **made), nn.RMSNorm(dim, **made)
        self.qkv = FusedQKVLinear(dim, heads, kv_heads, **options)
        self.wo = RowParallelLinear(dim, dim, bias=False, **options)
        self.ffn = swiglu_feed_forward(dim, hidden, fused=fused, **options)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        # [batch, sequence, heads, head_dim] -> heads before the sequence
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Llama(nn.Module):
    """Activations are `[batch, sequence / R, dim]` between blocks."""

    def __init__(
        self,
        *,
        vocab: int = 32,
        dim: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 24,
        layers: int = 2,
        fused: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **tp: Any,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype, **tp}
        self.embedding = nn.Embedding(vocab, dim, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden, fused, options) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, device=device, dtype=dtype)
        self.head = nn.Linear(dim, vocab, bias=False, device=device, dtype=dtype)
        self.tp_group = tp.get("tp_group")
        norms = [p for name, p in self.named_parameters() if "norm" in name]
        sum_gradients_over_tp(norms, self.tp_group)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, sequence, vocab]`, the same on all tensor-parallel ranks."""
        x = self.embedding(ids)
        if self.tp_group is not None:
            x = split_sequence(x, self.tp_group, sequence_dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.tp_group is not None:
            x = gather_sequence(x, self.tp_group, sequence_dim=1, consumers="same")
        return self.head(x)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean over all tokens, the same on all tensor-parallel ranks."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def batch(seed: int, *, vocab: int = 32, size: int = 3, sequence: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets `[size, sequence]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (size, sequence + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def tp_part(name: str, whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a parameter (or its gradient) of the stock model, by its name."""
    if name.endswith(("qkv.weight", "w13", "w1.weight", "w3.weight")):
        return whole.chunk(size, 0)[rank]
    if name.endswith(("wo.weight", "w2.weight")):
        return whole.chunk(size, 1)[rank]
    return whole

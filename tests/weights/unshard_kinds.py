"""Modules that use their weights by functions other than `F.linear`, for tests of `unshard=`: all take `[10, 8]`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Experts(nn.Module):
    """As Hugging Face keeps them: all experts in one tensor, indexed."""

    def __init__(self, count: int = 5, width: int = 8, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, hidden, width) * 0.3)
        self.down = nn.Parameter(torch.randn(count, width, hidden) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            mine = x[expert :: self.up.shape[0]]
            out[expert :: self.up.shape[0]] += F.linear(F.silu(F.linear(mine, self.up[expert])), self.down[expert])
        return out


class Conv1D(nn.Module):
    """As in GPT-2: the weight is transposed, and addmm takes it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) * 0.3), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(x.shape)


class Transposed(nn.Linear):
    """As in Falcon; a Linear whose weight goes into no F.linear."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class Sparse(nn.Module):
    """Saves a sparse tensor for backward, and a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x @ self.weight)
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, x.shape[0]]))
        return torch.tanh(nested).values() + x


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(8) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(3, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = x * row
        return x + self.named["a"].sum(0)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.t()[None])[0].t().contiguous()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[None], x[None], x[None])[0][0]


class Layers(nn.Module):
    """torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(8, 8))
        self.bilinear, self.cell, self.slope = nn.Bilinear(8, 8, 8), nn.GRUCell(8, 8), nn.PReLU()
        self.grouped, self.back = nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ConvTranspose2d(4, 2, 1)
        self.norms = nn.Sequential(nn.GroupNorm(2, 8), nn.LayerNorm(8))
        self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.slope(self.cell(self.bilinear(self.normed(x), x)))
        x = self.back(self.grouped(x.view(-1, 2, 2, 2))).view(-1, 8)
        return self.block(self.norms(x)[None])[0]


class Numbers(nn.Module):
    """Parameters and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))


class Chain(nn.ModuleList):
    """A list with a forward."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.numbers, self.shift = Numbers(), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self[1](torch.tanh(self[0](x)))) * self.numbers.scale + self.shift


KINDS = [Experts, Conv1D, Transposed, Lists, Convolution, Attention, Layers, Chain]  # and `Sparse`, which loads a lot


def model_of(kinds=KINDS) -> nn.Module:
    """A Linear, one module of each kind, a Linear."""
    return nn.Sequential(nn.Linear(8, 8), *[kind() for kind in kinds], nn.Linear(8, 8))

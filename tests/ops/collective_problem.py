"""One linear layer, whole, from a seed, with its gradients in fp64: what every rank's part is compared with.

Integer values make every product and sum exact in fp32 and in bf16's accumulators, so any difference is a mix-up and
not rounding, whatever the order of addition. Random values show that nothing is rounded where nothing crosses ranks,
and how much is where something does.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@dataclasses.dataclass
class Case:
    """Sizes of a layer. `sequence_dim` says which dim of the 3-d activations is the sequence."""

    ranks: int = 2
    sequence: int = 8
    batch: int = 3
    k: int = 8
    n: int = 12
    dtype: torch.dtype = torch.float32
    bias: bool = True
    sequence_dim: int = 0
    integers: bool = True

    def activations(self, features: int, seed: int) -> torch.Tensor:
        """`[sequence, batch, features]` or `[batch, sequence, features]`."""
        shape = (self.sequence, self.batch) if self.sequence_dim == 0 else (self.batch, self.sequence)
        return self.draw((*shape, features), seed)

    def draw(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.integers:
            # products of -1, 0 and 1: sums stay below 256, hence exact even when rounded to bf16
            return torch.randint(-1, 2, shape, generator=generator).to(self.dtype)
        return torch.randn(shape, generator=generator).to(self.dtype)

    def x(self) -> torch.Tensor:
        return self.activations(self.k, 1)

    def weight(self) -> torch.Tensor:
        return self.draw((self.n, self.k), 2)

    def b(self) -> torch.Tensor | None:
        return self.draw((self.n,), 3) if self.bias else None

    def dy(self) -> torch.Tensor:
        return self.activations(self.n, 4)

    def sequence_part(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence of whole activations."""
        return t.chunk(self.ranks, self.sequence_dim)[dist.get_rank()]

    def part(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.chunk(self.ranks, dim)[dist.get_rank()]


@dataclasses.dataclass
class Gradients:
    """What a layer gives: output, and gradients of input, weight and bias."""

    y: torch.Tensor
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    db: torch.Tensor | None


def reference(case: Case, dtype: torch.dtype = torch.float64) -> Gradients:
    """The whole layer in one process."""
    x, w, b = case.x().to(dtype), case.weight().to(dtype), case.b()
    x.requires_grad_()
    w.requires_grad_()
    if b is not None:
        b = b.to(dtype).requires_grad_()
    y = torch.nn.functional.linear(x, w, b)
    y.backward(case.dy().to(dtype))
    return Gradients(y.detach(), x.grad, w.grad, None if b is None else b.grad)


def magnitude(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`|a| @ |b|` in fp64: what rounding errors of a product are relative to."""
    return a.double().abs() @ b.double().abs()


def plain(t: torch.Tensor) -> torch.Tensor:
    """A leaf of its own, contiguous."""
    return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_()

"""What a run of the demo can be told."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `--sizes name=value,...` may set. Defaults: 3.6 million parameters, a few minutes of two CPU cores."""

    layers: int = 6
    hidden: int = 192
    heads: int = 6
    seq: int = 128
    batch: int = 8
    """Sequences per data rank and step."""
    lr: float = 2e-3


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one run spreads over the ranks: tensor parallel x GTP; the rest is data parallel."""

    name: str
    tp: int
    gtp: int


@dataclasses.dataclass(frozen=True)
class Options:
    """The same for both runs.

    Attributes:
        steps: Training steps.
        seed: Of the initial weights and of the batches.
        bf16: bf16 weights with fp32 master copies.
        moe: Experts per layer; 0 for a dense model.
        mtp: Layers that predict further tokens.
        recompute: Activations are recomputed in backward.
        distributed_optimizer: Megatron's, which shards optimizer state over replicas too.
        load: Folder of a checkpoint that both runs start from.
    """

    steps: int
    seed: int
    bf16: bool = False
    moe: int = 0
    mtp: int = 0
    recompute: bool = False
    distributed_optimizer: bool = False
    load: Path | None = None

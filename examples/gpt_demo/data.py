"""Byte-level text: the Python standard library's own source files, or any file or folder."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import torch

VOCAB = 256  # one token per byte: nothing to download, nothing to train
_HELD_OUT_EVERY = 20  # of a folder, every 20th file is held out; of a single file, its last 20th


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8 `[bytes]` each. The two parts share no file (or, for a single file, no stretch)."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    def batch(self, *, step: int, data_rank: int, batch: int, seq: int, seed: int) -> torch.Tensor:
        """Sequences `[batch, seq + 1]` (int64) for one step of one data rank: equal for equal arguments, everywhere."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + data_rank)
        starts = torch.randint(len(self.train) - seq - 1, (batch,), generator=generator)
        return torch.stack([self.train[s : s + seq + 1] for s in starts.tolist()]).long()

    def evaluation(self, *, data_rank: int, data_size: int, count: int, seq: int) -> torch.Tensor:
        """`count` sequences `[count, seq + 1]` spread evenly over the held-out text, this rank's share of them."""
        starts = torch.linspace(0, len(self.held_out) - seq - 1, count * data_size).long()[data_rank::data_size]
        return torch.stack([self.held_out[s : s + seq + 1] for s in starts.tolist()]).long()


def load(path: Path | None, *, seq: int) -> Corpus:
    """Reads a file, a folder (all its files, sorted by name), or by default Python's standard library.

    Raises:
        SystemExit: there is too little text for one sequence in each part.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in sorted(root.rglob("*.py")) if "site-packages" not in f.parts]
        source = f"Python {sysconfig.get_python_version()} standard library"
    else:
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        source = str(path)
    if len(files) == 1:
        text = files[0].read_bytes()
        cut = len(text) - len(text) // _HELD_OUT_EVERY
        parts = [text[:cut], text[cut:]]
    else:
        held_out = files[::_HELD_OUT_EVERY]
        train = [f for i, f in enumerate(files) if i % _HELD_OUT_EVERY]
        parts = [b"\n".join(f.read_bytes() for f in some) for some in (train, held_out)]
    if min(len(p) for p in parts) <= seq + 1:
        raise SystemExit(
            f"{source}: too little text. Each part needs more than {seq + 1} bytes, got {[*map(len, parts)]}"
        )
    return Corpus(*(torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in parts), source=source)

"""Plots of the demo: loss curves, memory per rank, and what the schedule did in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt_demo.report import MIB
from gpt_demo.training import Result

_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")


def save(plain: Result, sharded: Result, folder: Path) -> list[Path]:
    """Writes the PNG files and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "loss.png", folder / "memory.png", folder / "schedule.png"]
    _losses(plain, sharded, paths[0])
    _memory(plain, sharded, paths[1])
    _schedule(sharded, paths[2])
    return paths


def _losses(plain: Result, sharded: Result, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    above.plot(plain.losses, color=_COLORS[0], linewidth=4, alpha=0.45, label=plain.layout.name)
    above.plot(sharded.losses, color=_COLORS[1], linewidth=1.2, label=sharded.layout.name)
    above.set_ylabel("training loss, nats per byte")
    above.legend()
    above.set_title("Sharding the weights does not change the training")
    below.plot([b - a for a, b in zip(plain.losses, sharded.losses, strict=True)], color="black", linewidth=1)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _memory(plain: Result, sharded: Result, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4.5), layout="constrained")
    names = [plain.layout.name, sharded.layout.name]
    bottoms = [0.0, 0.0]
    for color, label, attribute in zip(
        _COLORS,
        ("weights", "gradients", "optimizer state", "gtp's buffers, peak"),
        ("bytes_weights", "bytes_grads", "bytes_optimizer", "bytes_buffers"),
        strict=True,
    ):
        heights = [getattr(r, attribute) / MIB for r in (plain, sharded)]
        axis.bar(names, heights, bottom=bottoms, color=color, label=label, width=0.5)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        axis.text(index, total, f"{total:.1f} MiB", ha="center", va="bottom")
    axis.set_ylabel("MiB per rank")
    axis.set_title("Memory per rank")
    axis.margins(y=0.12)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _schedule(sharded: Result, path: Path) -> None:
    """One row per weight; a bar from the start of its gather to its use, in order of uses within one step."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(one.weight for one in sharded.timeline))  # in order of their first use
    rows = {name: row for row, name in enumerate(names)}
    figure, axis = plt.subplots(figsize=(10, 1 + 0.22 * len(names)), layout="constrained")
    colors: dict[str, Any] = {"forward": _COLORS[0], "recompute": _COLORS[2], "backward": _COLORS[1]}
    seen: set[str] = set()
    for one in sharded.timeline:
        label = one.phase if one.phase not in seen else None
        seen.add(one.phase)
        row, color = rows[one.weight], colors[one.phase]
        axis.barh(row, one.use - one.started, left=one.started, height=0.6, color=color, alpha=0.45)
        axis.plot([one.use], [row], marker="|", linestyle="", markersize=9, markeredgewidth=2, color=color, label=label)
    axis.set_yticks(range(len(names)), [n.removeprefix("decoder.") for n in names], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("use of a weight within one training step (bar: from the start of its gather to its use)")
    axis.set_title("The schedule: weights are on their way before their GEMM asks for them")
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""What the demo prints: a progress bar while it trains, a table at the end."""

from __future__ import annotations

import math
import sys

from tqdm import tqdm

from gpt_demo.settings import Options
from gpt_demo.training import Result

MIB = 2**20


class Progress:
    """One line per run on rank 0: loss, tokens per second, bytes of weights, gradients and optimizer state."""

    def __init__(self, title: str, steps: int, *, show: bool) -> None:
        self._bar = tqdm(
            total=steps, desc=f"{title:<22}", disable=not show, file=sys.stdout, dynamic_ncols=True, mininterval=0.5,
            bar_format="{desc} {bar:20} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
        )  # fmt: skip

    def __call__(self, step: int, loss: float, tokens_per_second: float, bytes_held: int) -> None:
        self._bar.set_postfix_str(
            f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {bytes_held / MIB:.1f} MiB per rank", refresh=False
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


PASSED = "PASSED: the weights are sharded, the losses are the same."


def allowed_difference(options: Options, gtp: int) -> tuple[float, str]:
    """How far the two loss curves may be apart, relative to the loss, and why."""
    if options.bf16:
        return 2e-2, "bf16: gradients are rounded at other places, and Adam amplifies that over the steps"
    if gtp > 2:
        return 1e-3, f"fp32, {gtp} ranks: gradients are added in another order than all-reduce does"
    if options.mtp:
        return 1e-3, "the output layer is used several times: gradients are added over uses and ranks in another order"
    return 0.0, "fp32, two ranks: the sum of two gradients has one order"


def differences(plain: Result, sharded: Result) -> list[float]:
    """Per step, difference of the losses relative to the unsharded one."""
    return [abs(a - b) / abs(a) for a, b in zip(plain.losses, sharded.losses, strict=True)]


def table(plain: Result, sharded: Result, source: str) -> str:
    """Losses at some steps, then bytes per rank, then what the schedule did."""
    steps = len(plain.losses)
    shown = sorted({*range(0, steps, max(steps // 8, 1)), steps - 1})
    lines = [
        f"Text: {source}",
        "",
        f"{'step':>6} {plain.layout.name:>14} {sharded.layout.name:>14} {'difference':>12}",
        *(
            f"{i:>6} {plain.losses[i]:>14.6f} {sharded.losses[i]:>14.6f} {sharded.losses[i] - plain.losses[i]:>12.3g}"
            for i in shown
        ),
        "",
        f"{'':<24} {plain.layout.name:>14} {sharded.layout.name:>14} {'ratio':>8}",
    ]
    names = ("weights", "gradients", "optimizer state", "buffers, peak")
    rows = list(zip(names, _bytes(plain), _bytes(sharded), strict=True))
    rows.append(("sum", sum(_bytes(plain)), sum(_bytes(sharded))))
    for name, a, b in rows:
        ratio = f"{b / a:.3f}" if a else ""
        lines.append(f"{name + ' per rank':<24} {a / MIB:>10.2f} MiB {b / MIB:>10.2f} MiB {ratio:>8}")
    lines += [
        f"{'tokens/s, all ranks':<24} {plain.tokens_per_second:>14,.0f} {sharded.tokens_per_second:>14,.0f}",
        f"{'held out, bits/byte':<24} {plain.held_out_bits:>14.4f} {sharded.held_out_bits:>14.4f}",
    ]
    stats = sharded.stats
    if stats is not None:
        lines += [
            "",
            f"Schedule: {stats.consumes} uses of a weight, {stats.prefetch_hits} gathered ahead of time "
            f"({stats.prefetch_hits / max(stats.consumes, 1):.1%}), {stats.on_demand_gathers} on demand, "
            f"{stats.wrong_guesses} gathered and not used.",
            f"Transport {stats.transport} ({stats.transport_reason}): {stats.bytes_gathered / MIB:,.0f} MiB gathered, "
            f"{stats.bytes_reduced / MIB:,.0f} MiB of gradients reduced; up to {stats.peak_leased_bytes / MIB:.2f} MiB "
            "of gathered weights at a time.",
        ]
    return "\n".join(lines)


def _bytes(result: Result) -> tuple[int, int, int, int]:
    return result.bytes_weights, result.bytes_grads, result.bytes_optimizer, result.bytes_buffers


def verdict(plain: Result, sharded: Result, options: Options) -> list[str]:
    """What is wrong with the runs; empty if nothing is."""
    problems = []
    bound, why = allowed_difference(options, sharded.layout.gtp)
    worst = max(differences(plain, sharded))
    if not worst <= bound:
        problems.append(f"losses differ by {worst:.3g} relative; allowed is {bound:g} ({why})")
    first = plain.losses[0] / math.log(2)
    if options.load is None and not sharded.held_out_bits < 0.65 * first:
        problems.append(
            f"held-out loss {sharded.held_out_bits:.3f} bits per byte is not below 65% of the first loss {first:.3f}: "
            "the model has not learned; give it more --steps"
        )
    return problems

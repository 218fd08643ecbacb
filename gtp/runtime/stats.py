"""`RuntimeStats`: what `GTPRuntime.stats()` returns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Counters of one runtime on this rank, since it was made.

    Attributes:
        transport: Name of the transport in use.
        transport_reason: Why it was chosen.
        consumes: Uses of a weight group by a GEMM: forward, recompute, backward.
        prefetch_hits: Consumes that found their weight gathered or on its way.
        on_demand_gathers: Consumes that had to start their own gather.
        wrong_guesses: Gathers that nobody used.
        kept: Consumes that left the gathered weight in place for a later use.
        bytes_gathered: Bytes of full weights assembled (the share that crossed the wire is (N-1)/N of it).
        bytes_reduced: Bytes of full wgrads reduced.
        peak_leased_bytes: Most bytes of memory for gathered weights in use at one time; (N-1)/N of the weights where
            this rank's own shards are mapped into them.
        peak_wgrad_bytes: Most bytes of full wgrads alive at one time.
        unreduced_bytes: Bytes of full-size gradients held right now because of `no_sync`.
    """

    transport: str
    transport_reason: str
    consumes: int
    prefetch_hits: int
    on_demand_gathers: int
    wrong_guesses: int
    kept: int
    bytes_gathered: int
    bytes_reduced: int
    peak_leased_bytes: int
    peak_wgrad_bytes: int
    unreduced_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of consumes that were prefetch hits, 0 to 1; 1 before the first consume."""
        return self.prefetch_hits / self.consumes if self.consumes else 1.0

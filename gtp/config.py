"""`GTPConfig`: every knob of a gtp runtime, validated once, frozen afterwards."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Literal

import torch

from gtp.errors import GTPValueError

GradReduce = Literal["mean", "sum"]
TransportName = Literal["auto", "process_group", "copy_engine"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTPConfig:
    """Settings of one `GTPRuntime`.

    Attributes:
        prefetch_bytes: Bytes of gathered weights that may be held ahead of their use, per rank, beside the
            one in use. `None` (default) means four times the mean weight group of the runtime, so a
            stack of equal layers is gathered four weights ahead and a mixture-of-experts model about a block
            ahead. `0` turns prefetching off. At least one weight is prefetched otherwise, however
            large.
        keep_bytes: Bytes of gathered weights that may stay from the end of forward to the start of
            backward, per rank, on top of `prefetch_bytes`. Default 0.
        param_dtype: Dtype of the gathered weight. `None` (default): the shard's own. Otherwise each rank
            holds one copy of its shard in this dtype, cast before the gather (so fewer bytes travel) and
            refreshed after each optimizer step. Forward and backward then compute in this dtype.
        grad_reduce: `"mean"` (default) averages gradients over the ranks, which see different data, as data
            parallelism does; `"sum"` adds them, for a loss that is already divided by all tokens.
        grad_dtype: Dtype of `.grad`. `None` (default): the shard's dtype. A `main_grad` on the weight keeps
            the dtype that its owner gave it.
        reduce_dtype: Dtype of weight gradients on the wire. `None` (default): the dtype the wgrad GEMM
            computes in. Addition over ranks is in fp32 (fp64 for fp64 weights) whatever this says.
        alignment: Shard rows are a multiple of this many rows. Default 1. Padding sits at the tail of the
            weight, is zero, and is seen by nobody.
        min_numel: Weights with fewer elements stay replicated. Default 0: every Linear and Embedding weight
            is sharded.
        transport: How bytes move. `"process_group"`: collectives of torch.distributed (NCCL, gloo).
            `"copy_engine"`: peer copies in symmetric memory, inside one NVLink domain. `"auto"` (default)
            takes the copy engine where it works; `runtime.stats()` and one log line say which it was and why.
        map_shards: Whether the copy engine maps this rank's own shards into gathered weights (default True), or copies
            them as it does where they cannot be mapped: slower, to tell whether a driver is at fault. Ignored by
            `process_group`.
        reduce_sms: Upper bound on the streaming multiprocessors that the copy engine's gradient addition
            kernel may occupy. Default 44. Ignored by `process_group`.
        peer_timeout: Seconds that the copy engine may wait for another rank without any progress before `PeerError`
            names that rank. Default 600. `process_group` has its group's own timeout.
        debug: Compare each collective with the other ranks' before it starts, and raise `DesyncError` with
            both sides' names when they differ. Slow (one store round trip per collective); costs nothing
            when off. Default False.
        debug_timeout: Seconds that the debug check waits for a rank that does not come. Default 10.

    Raises:
        GTPValueError: on an unknown field or a value outside the above.
    """

    prefetch_bytes: int | None = None
    keep_bytes: int = 0
    param_dtype: torch.dtype | None = None
    grad_reduce: GradReduce = "mean"
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    alignment: int = 1
    min_numel: int = 0
    transport: TransportName = "auto"
    map_shards: bool = True
    reduce_sms: int = 44
    peer_timeout: float = 600.0
    debug: bool = False
    debug_timeout: float = 10.0

    def __new__(cls, *args: Any, **fields: Any) -> GTPConfig:
        # dataclass would raise a bare TypeError; a typo deserves the near name
        if args:
            raise GTPValueError(
                f"GTPConfig takes keyword arguments only, got {len(args)} positional: write GTPConfig(name=value)"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise GTPValueError(f"GTPConfig has no field {name!r}: {hint}Fields are {', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._require_int("prefetch_bytes", minimum=0, optional=True)
        self._require_int("keep_bytes", minimum=0)
        self._require_int("alignment", minimum=1)
        self._require_int("min_numel", minimum=0)
        self._require_int("reduce_sms", minimum=1)
        self._require_choice("grad_reduce", ("mean", "sum"))
        self._require_choice("transport", ("auto", "process_group", "copy_engine"))
        for name in ("param_dtype", "grad_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in _FLOATS:
                allowed = ", ".join(str(d) for d in _FLOATS)
                raise GTPValueError(f"GTPConfig.{name} must be None or one of {allowed}, got {value!r}")
        for name in ("map_shards", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise GTPValueError(f"GTPConfig.{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("debug_timeout", "peer_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise GTPValueError(f"GTPConfig.{name} must be a number of seconds above 0, got {value!r}")

    def _require_int(self, name: str, *, minimum: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            none = "None or " if optional else ""
            raise GTPValueError(f"GTPConfig.{name} must be {none}an integer >= {minimum}, got {value!r}")

    def _require_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise GTPValueError(f"GTPConfig.{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")

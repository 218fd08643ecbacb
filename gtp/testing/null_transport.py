"""`NullTransport`: moves nothing, so that a benchmark of the host sees the host alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.runtime.group import WeightGroup
from gtp.runtime.transport import Transport


class NullTransport(Transport):
    """Answers every call at once. Gathered weights and reduced wgrads hold whatever their memory held."""

    name = "null"

    def start_gather(self, group: WeightGroup, out: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event]) -> Any:
        return self

    def finish_gather(self, ticket: Any) -> None:
        pass

    def start_reduce(
        self,
        group: WeightGroup,
        wgrads: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        accumulate: Sequence[bool],
        divisor: int,
    ) -> Any:
        return self

    def finish_reduce(self, ticket: Any) -> None:
        pass

    def start_all_reduce(self, flat: torch.Tensor, process_groups: Sequence[dist.ProcessGroup]) -> Any:
        flat *= math.prod([group.size() for group in process_groups])  # as if all had sent the same
        return []

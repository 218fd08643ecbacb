"""How the tools of `collectives.py` get between a caller and `torch.distributed`: as attributes of the module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gtp.errors import GTPValueError

KINDS: Final = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
)
"""The entry points that are replaced."""

# parameter names of each entry point: what it reads, what it writes
_READS: Final = ("input_tensor", "input", "tensor", "input_list")
_WRITES: Final = ("output_tensor", "output", "tensor_list")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of an entry point, with its arguments by role."""

    kind: str
    real: Callable[..., Any]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, kind: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        # the innermost real function has the signature; wrappers pass theirs on
        bound = inspect.signature(real).bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(kind, real, dict(bound.arguments))

    @property
    def reads(self) -> list[torch.Tensor]:
        return self._tensors(_READS)

    @property
    def writes(self) -> list[torch.Tensor]:
        # all_reduce and broadcast write what they read
        return self._tensors(_WRITES) or self.reads

    @property
    def in_place(self) -> bool:
        return not self._tensors(_WRITES)

    @property
    def async_op(self) -> bool:
        return bool(self.arguments["async_op"])

    @property
    def group(self) -> dist.ProcessGroup:
        return self.arguments["group"] or c10d._get_default_group()

    @property
    def coalesced(self) -> bool:
        return self.group in c10d._world.pg_coalesce_state

    def _tensors(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for name in names:
            value = self.arguments.get(name)
            if value is not None:
                found += [value] if isinstance(value, torch.Tensor) else list(value)
        return found

    def issue(self, replacements: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> Any:
        """Calls the real one, each tensor replaced by its partner in `replacements`."""

        def replaced(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next((new for old, new in replacements if old is value), value)
            if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                return [replaced(v) for v in value]
            return value

        return self.real(**{name: replaced(value) for name, value in self.arguments.items()})

    def describe(self) -> str:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}".replace("torch.", "") for t in self.writes)
        return f"{self.kind} into {shapes}"


@contextmanager
def replaced_entry_points(kinds: Collection[str], handler: Callable[[Call], Any]) -> Iterator[None]:
    """Every call of these entry points becomes `handler(call)`."""
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise GTPValueError(f"kinds: {', '.join(sorted(unknown))} unknown; there are {', '.join(KINDS)}")
    with ExitStack() as undo:
        for kind in kinds:
            real = getattr(dist, kind)

            # `wraps` keeps the signature reachable for a second tool on top of this one
            @functools.wraps(real)
            def entry(*args: Any, _kind: str = kind, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
                return handler(Call.of(_kind, _real, args, kwargs))

            undo.enter_context(mock.patch.object(dist, kind, entry))
        yield


@contextmanager
def manager_hooks(on_exit: Callable[[Any], None], after_wait: Callable[[Any], None]) -> Iterator[None]:
    """Calls `on_exit(manager)` when an async coalescing block ends, and `after_wait(manager)` at the end of `wait`."""
    cls: Any = c10d._CoalescingManager
    real_append, real_wait = cls.append, cls.wait

    def append(self: Any, work: dist.Work | None = None) -> None:
        real_append(self, work)
        on_exit(self)

    def wait(self: Any) -> None:
        real_wait(self)
        after_wait(self)

    with mock.patch.object(cls, "append", append), mock.patch.object(cls, "wait", wait):
        yield

"""Memory in tests: which storages are alive, what autograd holds, and what happens to memory that nobody wrote."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@dataclasses.dataclass(frozen=True)
class LiveStorage:
    """One piece of memory that at least one tensor can reach.

    Attributes:
        nbytes: Size of the whole storage, whatever part of it the tensors view.
        device: Where it lies.
        shapes: Shapes of the tensors that were found on it, to recognize it by.
    """

    nbytes: int
    device: torch.device
    shapes: tuple[tuple[int, ...], ...]


class SavedTensors:
    """The tensors that autograd saved for backward inside a `saved_tensors` block and still holds."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def storages(self, min_bytes: int = 1) -> list[LiveStorage]:
        """Distinct storages of at least `min_bytes` that saved tensors hold now."""
        return _storages((saved.tensor for saved in self._alive), min_bytes)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # a saved output would hold its own graph node; anything else is kept as the object that it is
        saved = _Saved(tensor if tensor.grad_fn is None else tensor.detach())
        self._alive.add(saved)
        return saved


@dataclasses.dataclass(eq=False)
class _Saved:
    tensor: torch.Tensor


@contextmanager
def saved_tensors() -> Iterator[SavedTensors]:
    """Counts what autograd saves inside the block; the count stays readable, and shrinks as graphs go, after it.

    Garbage collection does not know tensors that only an autograd graph holds. Those saved inside this block are known
    both to the `SavedTensors` and to `live_full_storages`. An inner block of saved-tensor hooks, such as activation
    checkpointing, hides what is saved inside it.
    """
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved._pack, lambda held: held.tensor):
        yield saved


def live_full_storages(min_bytes: int) -> list[LiveStorage]:
    """Distinct storages of at least `min_bytes` that some Python-visible tensor of this process reaches.

    With `min_bytes` the size of one full weight this counts the full weights that are in memory. Runs the garbage
    collector first, so what only cycles hold does not count. Tensors without memory of their own (meta, sparse) do not
    either, nor objects under `gc.freeze`: in a rank of a `RankPool` those from before the last function that found
    modules newly imported.
    """
    gc.collect()
    # by type: isinstance would ask proxies for their class, which may import or warn
    return _storages((o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)), min_bytes)


def live_bytes(min_bytes: int = 1) -> int:
    """Bytes of all that `live_full_storages(min_bytes)` finds."""
    return sum(storage.nbytes for storage in live_full_storages(min_bytes))


def _storages(tensors: Iterable[torch.Tensor], min_bytes: int) -> list[LiveStorage]:
    found: dict[tuple[torch.device, int], int] = {}
    shapes: dict[tuple[torch.device, int], list[tuple[int, ...]]] = defaultdict(list)
    # a subclass may refuse, or record, what is asked of it
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.device.type == "meta" or tensor.layout != torch.strided:
                continue
            if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
                continue  # a wrapper such as ShardTensor, DTensor or FakeTensor; what it holds is found by itself
            storage = tensor.untyped_storage()
            if storage.nbytes() >= max(min_bytes, 1):
                key = (tensor.device, storage.data_ptr())
                found[key] = storage.nbytes()
                shapes[key].append(tuple(tensor.shape))
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [LiveStorage(nbytes, key[0], tuple(shapes[key])) for key, nbytes in ordered]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory from `torch.empty` and its kin with NaN (integers: the largest value) inside the block.

    So use of memory that nobody wrote shows in the result. Ops without a deterministic implementation warn.
    """
    # torch replaces this module by an object of a class that checkers do not know
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = before[2]

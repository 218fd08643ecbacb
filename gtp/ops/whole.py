"""`WholeWeights`: full weights for code that is no op of gtp, a module's forward with whatever functions it calls.

[Note: what backward reads] Functions save the weight, or views of it, for backward, and each would hold the full weight
from forward to backward. While the weights are whole, saved-tensor hooks put in its place which part of which weight
was saved, and backward, when it first reads one, has the weight gathered again. torch asks the innermost hooks only, so
what is no part of a weight is handed to those that were there before (checkpointing, offloading), and where there are
none, looked at again as torch does: a tensor that was written since is no longer what forward had.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import Variable

from gtp.errors import GTPStateError
from gtp.ops._common import (
    apply_of,
    finish_wgrads,
    is_wanted,
    plain_access,
    refuse_double_backward,
    refuse_sparse,
    wgrad_buffers,
)
from gtp.ops.compilers import never_compiled
from gtp.ops.versions import ShardVersions
from gtp.protocol import describe_weight, materialize_weight_for_backward, materialize_weight_for_forward

_NO_TASK: Final = -1  # what torch answers outside of a backward


class WholeWeights:
    """A context manager: inside, the full weights, differentiable in grad mode; to be entered once.

    Leaving it lets go of them. Their gradients are handed over when all uses inside have had their backward.

    Args:
        weights: Distributed, each the leader of its group; per rank `[shard_rows, ...]`.

    Raises:
        GTPStateError: on leaving, a full weight was written, which changes no shard; in backward, a shard or a saved
            tensor was written since the forward.
        UnsupportedError: double backward; a transform of torch.func.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._use = _Use(weights)
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> list[torch.Tensor]:
        """One full weight `[rows, ...]` per entry, plain tensors in the compute dtype."""
        try:
            full = self._use.gather()
            if torch.is_grad_enabled():
                outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
                packing = _Packing(self._use, outer)
                hooks = torch.autograd.graph.saved_tensors_hooks(packing.pack, packing.unpack)
                hooks.__enter__()
                self._hooks = hooks
        except BaseException:
            self._use.leave(check=False)
            raise
        return full

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
        self._use.leave(check=error is None)


class _Use:
    """One forward's use of some weights, until its backward."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = list(weights)
        self._versions = ShardVersions(self.weights)
        self._full: list[torch.Tensor] = []  # in forward
        self._gathered: list[tuple[int, int]] = []
        self._again: dict[int, torch.Tensor] = {}  # in the backward `_task`, by position
        self._task = _NO_TASK

    def gather(self) -> list[torch.Tensor]:
        if torch.is_inference_mode_enabled():  # weights are none of its tensors, which have no versions
            with torch.inference_mode(False), torch.no_grad():
                return self.gather()
        for position, weight in enumerate(self.weights):
            with plain_access():
                trained = weight.requires_grad and torch.is_grad_enabled()
            if trained:
                self._full.append(_apply(weight, self, position))
            else:
                with torch.no_grad():
                    self._full.append(materialize_weight_for_forward([weight])[0].detach())
        self._gathered = _marks(self._full)
        return list(self._full)

    def leave(self, *, check: bool) -> None:
        written = check and _marks(self._full) != self._gathered
        self._full = []
        if written:
            raise refused_write(self.weights)

    def part(self, tensor: torch.Tensor) -> _Part | None:
        """Which part of a full weight `tensor` is, while it is whole; None if it is none, or not told by its memory."""
        if not _is_memory_alone(tensor):
            return None
        storage = tensor.untyped_storage()._cdata  # not its memory: zeros that torch makes in forward mode have none
        for position, full in enumerate(self._full):
            if full.untyped_storage()._cdata == storage:
                start = _start(tensor) - _start(full)  # weights that are gathered together share a storage
                if 0 <= start < full.nbytes or (tensor.numel() == 0 and start == full.nbytes):
                    return _Part(position, tensor.dtype, tuple(tensor.shape), tensor.stride(), start)
        return None

    def read(self, part: _Part) -> torch.Tensor:
        """The part, of the weight gathered again. It is kept for this backward's other readers."""
        position = part.position
        task = torch._C._current_graph_task_id()
        if task != self._task:  # a backward that raised has not cleared what it read
            self._again.clear()
            self._task = task
        full = self._again.get(position)
        if full is None:
            self._versions.check(self.weights)
            with torch.no_grad():
                full = materialize_weight_for_backward([self.weights[position]])[0].detach()
            if task != _NO_TASK:  # else somebody looks at what a node of the graph has saved
                if not self._again:
                    Variable._execution_engine.queue_callback(self._again.clear)
                self._again[position] = full
        start = (_start(full) + part.start) // part.dtype.itemsize
        view = torch.empty(0, dtype=part.dtype, device=full.device)
        return view.set_(full.untyped_storage(), start, part.shape, part.stride)

    def let_go(self, position: int) -> None:
        """No gradient of the weight is computed any more."""
        self._again.pop(position, None)


def refused_write(weights: Sequence[torch.Tensor]) -> GTPStateError:
    """The error of a forward that wrote into a full weight of its own, with what to do."""
    names = ", ".join(map(describe_weight, weights))
    return GTPStateError(
        f"{names}: the module's forward wrote into a weight. It is gathered for the forward, a copy, and what is "
        "written would be lost. Write into the parameter between steps, or leave it unsharded with "
        "gtp.shard_model(exclude=...)"
    )


def _marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """What changes when a tensor is written, or gets other memory."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _start(tensor: torch.Tensor) -> int:
    """Where its first element lies in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _is_memory_alone(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape, strides and memory say what the tensor is: it is of no class of its own, has a storage,
    which sparse and nested ones have not, and no pending sign."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return plain and not (tensor.is_conj() or tensor.is_neg())


class _Part(NamedTuple):
    """A view of the full weight at `position`, from the byte `start` of it on."""

    position: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


class _Kept(NamedTuple):
    """A saved tensor that is no part of a weight, as the hooks outside packed it, or as it was."""

    value: Any
    version: int


class _Packing:
    """The two saved-tensor hooks of one use. See [Note: what backward reads]."""

    def __init__(self, use: _Use, outer: tuple[Any, Any] | None) -> None:
        self._use = use
        self._outer = outer

    def pack(self, tensor: torch.Tensor) -> _Part | _Kept:
        part = self._use.part(tensor)
        if part is not None:
            return part
        return _Kept(tensor if self._outer is None else self._outer[0](tensor), tensor._version)

    def unpack(self, packed: _Part | _Kept) -> torch.Tensor:
        if isinstance(packed, _Part):
            return self._use.read(packed)
        if self._outer is not None:
            restored: torch.Tensor = self._outer[1](packed.value)
            return restored
        saved: torch.Tensor = packed.value
        if saved._version != packed.version:
            raise GTPStateError(
                f"a tensor {tuple(saved.shape)} that the forward of a module with "
                f"{describe_weight(self._use.weights[0])} saved for its backward was changed in place since (version "
                f"{packed.version} became {saved._version}). Change a copy of it"
            )
        return saved


class _Whole(torch.autograd.Function):
    """Shard `[shard_rows, ...]` to full weight `[rows, ...]`; backward hands the full gradient over as a wgrad.

    The weight stays an attribute ([Note: weights stay out of save_for_backward] in gtp/ops/_common.py).
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, use: _Use, position: int) -> torch.Tensor:
        ctx.weight, ctx.use, ctx.position = weight, use, position
        return materialize_weight_for_forward([weight])[0].detach()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.weight
        refuse_double_backward([weight])
        ctx.use.let_go(ctx.position)
        if not is_wanted(ctx, 0):
            return None, None, None
        refuse_sparse(weight, grad)
        (buffer,) = wgrad_buffers([weight], grad.shape[0])
        # others may read what autograd hands in, and whoever finalizes may scale in place
        wgrad = grad.clone(memory_format=torch.contiguous_format) if buffer is None else buffer.copy_(grad)
        (answer,) = finish_wgrads([weight], [wgrad])
        return answer, None, None


_apply: Final = apply_of(_Whole)

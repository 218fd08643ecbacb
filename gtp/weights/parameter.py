"""`GTPWeight`: a parameter of which this rank stores its rows only."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, GTPValueError, UnsupportedError
from gtp.ops._common import refused_transform
from gtp.runtime.group import Member, WeightGroup
from gtp.runtime.process_group import gather_now
from gtp.runtime.runtime import GTPRuntime
from gtp.runtime.schedule import Phase
from gtp.runtime.tracing import refuse_tracing
from gtp.weights.askers import transform_level
from gtp.weights.conversion import let_go_of_graphs, take_over_hooks
from gtp.weights.full_tensor import differentiable_full_tensor
from gtp.weights.functions import dispatch, not_the_leader
from gtp.weights.gradient import ShardWithGradient
from gtp.weights.layout import ShardLayout
from gtp.weights.refusals import refused_hook
from gtp.weights.rows import ShardRows
from gtp.weights.shard_tensor import ShardOrigin, past_torch_function

_plain = torch._C.DisableTorchFunctionSubclass

_OURS = frozenset(["handle", "origin", "memory_of", "main_grad", "grad_added_to_main_grad"])

_get_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


@dataclasses.dataclass(eq=False, slots=True)
class WeightHandle:
    """What a `GTPWeight` knows: its name, its arithmetic, and the runtime that serves it.

    The weight holds its runtime strongly, so the runtime lives as long as any of its weights.
    """

    name: str
    layout: ShardLayout
    runtime: GTPRuntime
    group: WeightGroup
    position: int
    grad_dtype: torch.dtype | None
    hooks: OrderedDict[int, Callable[[torch.Tensor], None]] = dataclasses.field(default_factory=OrderedDict)
    graphed: bool = False  # whether autograd may bring it reduced gradients: see `ReturnedGradients`

    @property
    def member(self) -> Member:
        """The runtime's record of this weight."""
        return self.group.members[self.position]


class GTPWeight(ShardWithGradient, torch.nn.Parameter):
    """A weight sharded along dim 0 over a GTP group: an `nn.Parameter` of the shard's shape, and a `DistributedWeight`.

    Made by `gtp.shard_model` out of the parameter it replaces (the same object, so optimizers and ties keep working).
    Metadata, `.grad` and optimizer arithmetic are the shard's. `F.linear` and `F.embedding` compute with the full
    weight, gathered by the runtime. Any other function of it that would need the full weight raises
    `UnsupportedError`, and so it is with what was made of it: `.grad`, `.data`, `.detach()` and arithmetic on them are
    `ShardRows`. `.shard` is this rank's rows as a plain tensor, `full_tensor()` the whole.
    """

    is_distributed_weight = True
    is_weight = True
    handle: WeightHandle

    @classmethod
    def convert(cls, parameter: torch.nn.Parameter, shard: torch.Tensor, handle: WeightHandle) -> GTPWeight:
        """Turns `parameter` into a GTPWeight over `shard`, in place: every reference to it stays valid.

        Args:
            parameter: The full weight. Its storage is let go.
            shard: `[shard_rows, *trailing]`, plain.
            handle: Layout, runtime and group. `handle.member.owner` is set.
        """
        let_go_of_graphs(parameter, handle.name)
        parameter.data = shard
        handle.hooks = take_over_hooks(parameter)
        parameter.__class__ = cls
        weight: GTPWeight = parameter  # type: ignore[assignment]
        weight.handle = handle
        weight.origin = ShardOrigin(handle.name, handle.layout, handle.group.process_group)
        if handle.grad_dtype is not None:
            with _plain():
                weight.grad_dtype = handle.grad_dtype
        handle.member.owner = weight.memory_of = weakref.ref(weight)
        weight._look_at_storage()
        return weight

    # -- what users ask ------------------------------------------------------------------------------------------

    @property
    def layout(self) -> ShardLayout:  # type: ignore[override]  # torch.layout of a dense tensor is of no use here
        """Arithmetic between logical shape and shard."""
        return self.handle.layout

    @property
    def logical_shape(self) -> torch.Size:
        """Shape of the weight in the unsharded model."""
        return torch.Size(self.handle.layout.logical_shape)

    @property
    def group(self) -> dist.ProcessGroup:
        """The GTP group that holds the shards."""
        return self.handle.group.process_group

    @property
    def name(self) -> str:
        """Fully qualified name in the model that was sharded."""
        return self.handle.name

    @property
    def runtime(self) -> GTPRuntime:
        """The runtime that gathers this weight."""
        return self.handle.runtime

    @property
    def place_in_group(self) -> tuple[object, int]:
        """What the weights that are gathered together have in common, and its position among them, leader first."""
        return self.handle.group, self.handle.position

    @property
    def label(self) -> str:
        return f"sharded weight {self.handle.name!r}"

    @property
    def shard(self) -> torch.Tensor:
        """This rank's rows and padding `[shard_rows, *trailing]`, a plain tensor; not a copy.

        Plain memory, to look at whenever one likes, on any rank. To be written only between lines: after a backward or
        after a forward without grad mode, when no rank is gathering. `weight.data` and arithmetic on the weight itself
        under `torch.no_grad()` may be written at any time, by all ranks alike.
        """
        return self.plain_shard()

    def full_tensor(self) -> torch.Tensor:
        """The full weight `[rows, *trailing]` in the shard's dtype, a fresh plain tensor. Collective over the group.

        In grad mode it is differentiable: what a loss computes from it by any function adds to `.grad` as the use in a
        GEMM does. Memory: the full weight, for as long as the tensor or a graph of it lives.
        """
        with _plain():
            differentiable = self.requires_grad and torch.is_grad_enabled()
        if differentiable and transform_level() is not None:
            raise refused_transform(f"{self.label}: full_tensor() in grad mode inside a transform of torch.func")
        return differentiable_full_tensor(self) if differentiable else self.gathered()

    def gathered(self) -> torch.Tensor:
        """`full_tensor()`, as autograd sees it: a constant."""
        refuse_tracing(self.label)
        group = self.handle.group
        self.handle.runtime.transport.agree(group.process_group, f"call full_tensor of {self.handle.name}")
        return gather_now(self.plain_shard(), self.group)[: self.handle.layout.rows].clone()

    # -- what leaves the weight ----------------------------------------------------------------------------------

    def attributes_of_users(self) -> dict[str, Any]:
        """What was set on the parameter (`weight.scale = 2`): who gets the full weight in its place reads it there."""
        return {name: value for name, value in vars(self).items() if name not in _OURS}

    def checkpoint_part(self) -> tuple[torch.Tensor, ShardLayout]:
        """The shard and its layout, for `torch.distributed.checkpoint`."""
        return self.plain_shard(), self.handle.layout

    def local_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, made of the shard or after it, marked as this rank's rows if it has the shard's shape."""
        origin = self.origin
        with _plain():
            if tensor.shape != origin.shape:
                return tensor
            is_alias = tensor.data_ptr() == self.data_ptr()
        return ShardRows.of(tensor, origin, self.handle.member.owner if is_alias else None)

    def new_state(self, fresh: torch.Tensor) -> torch.Tensor:
        """As `local_state`, of a plain tensor of the shard's shape that nobody else has."""
        return ShardRows.out_of(fresh, self.origin)

    # -- DistributedWeight ---------------------------------------------------------------------------------------

    def materialize_group_for_forward(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """Full weights for the forward GEMM, one per weight of the group. See `gtp.protocol`."""
        return self._materialize(Phase.FORWARD)

    def materialize_group_for_backward(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """Full weights for the dgrad GEMM."""
        return self._materialize(Phase.BACKWARD)

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor | None]
    ) -> torch.Tensor | Sequence[torch.Tensor | None] | None:
        """Starts reducing the full wgrads. Deferred: the gradient arrives before backward ends.

        Beyond the contract, None stands for a weight of the group that had no part in what was differentiated; it gets
        no gradient.

        Ready, which is synchronous, in a backward whose gradients the caller wants returned (`torch.autograd.grad`).
        """
        handle = self.handle
        if handle.position:
            raise not_the_leader(self)
        given = [wgrads] if isinstance(wgrads, torch.Tensor) else list(wgrads)
        if len(given) != len(handle.group.members):
            raise GTPStateError(
                f"{handle.name}: finalize got {len(given)} wgrads for {len(handle.group.members)} weights"
            )
        returned = handle.runtime.finalize(handle.group, given)
        outcomes: list[torch.Tensor | None] = [None] * len(given) if returned is None else [*returned]
        return outcomes[0] if len(outcomes) == 1 else outcomes

    def grad_buffer(self) -> torch.Tensor:
        """Where the wgrad GEMM writes, `[rows, *trailing]`, contents undefined."""
        return self.handle.runtime.grad_buffer(self.handle.group, self.handle.position)

    # -- ShardOwner, the runtime's side --------------------------------------------------------------------------

    def plain_shard(self) -> torch.Tensor:
        """The shard as a plain tensor over the same storage and version counter."""
        with _plain():
            return self.detach()

    def writable_shard(self) -> torch.Tensor:
        """`weight.data` and `weight.detach()`: an alias, which may be written, and tells the weight so. It shares the
        version counter, unlike torch's own `.data`: prefetched copies know by it that they are stale."""
        return self.local_state(self.plain_shard())

    def adopt(self, shard: torch.Tensor) -> None:
        """The transport keeps the shard in memory of its own: use that."""
        self.set_data(shard)

    def wants_gradient(self) -> bool:
        """Whether it is trained."""
        return bool(past_torch_function(_get_requires_grad, (), (self,)))

    # -- what must not be silently wrong -------------------------------------------------------------------------

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Not supported: a shard's gradient does not travel through autograd.

        Raises:
            UnsupportedError: always.
        """
        raise refused_hook(f"{self.handle.name}: register_hook would")

    def set_data(self, data: torch.Tensor) -> None:
        """`weight.data = data`: re-points the shard's storage. Shape, dtype and device type must stay.

        Raises:
            GTPValueError: they differ, or `data` is not contiguous.
        """
        with _plain():
            have, given = (
                (tuple(self.shape), self.dtype, self.device.type),
                (tuple(data.shape), data.dtype, data.device.type),
            )
            if have != given:
                raise GTPValueError(
                    f"{self.handle.name}: .data of a sharded weight must keep shape, dtype and device type {have}, "
                    f"got {given}. Convert or move the model before gtp.shard_model; GTPConfig(param_dtype=...) "
                    "changes the dtype that GEMMs compute in"
                )
            if not data.is_contiguous():
                raise GTPValueError(
                    f"{self.handle.name}: .data of a sharded weight must be contiguous, because ranks gather from it; "
                    f"got strides {data.stride()}. Give it .contiguous(), or copy into the weight"
                )
            self.before_write()
            self.data = data.as_subclass(torch.Tensor)
            torch.autograd.graph.increment_version(self)
        self._look_at_storage()

    def set_(self, source: Any = None, *view: Any) -> GTPWeight:
        """As `weight.data = source`."""
        if not isinstance(source, torch.Tensor) or view:
            raise UnsupportedError(
                f"{self.label}: set_ with a storage or without a source. Give it a tensor of the shard's shape, or "
                "copy into the weight"
            )
        self.set_data(source)
        return self

    def before_write(self) -> None:
        """Somebody is about to write the shard: see [Note: no stale reads]."""
        self.handle.runtime.before_write([self.handle.group])

    def clear_padding(self) -> None:
        """Zeroes the rows of the shard that no logical row maps to, after somebody wrote the shard."""
        if self.origin.has_padding:
            with _plain(), torch.no_grad():
                self.detach()[self.handle.layout.valid_rows :].zero_()

    def _look_at_storage(self) -> None:
        member = self.handle.member
        copied = member.send is not member.shard
        member.shard = self.plain_shard()
        if not copied:
            member.send = member.shard

    def _materialize(self, phase: Phase) -> torch.Tensor | Sequence[torch.Tensor]:
        handle = self.handle
        if handle.position:
            raise not_the_leader(self)
        full = handle.runtime.materialize(handle.group, phase)
        # Transformer Engine decides by the full tensor whether a wgrad is wanted.
        for member, tensor in zip(handle.group.members, full, strict=True):
            owner = member.owner()
            if owner is not None and owner.wants_gradient():
                tensor.requires_grad_()
        return full[0] if len(full) == 1 else full

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(GTPWeight, func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        handle, layout = self.handle, self.handle.layout
        with _plain():
            dtype, device = self.dtype, self.device
        start, stop = layout.row_range()
        return (
            f"GTPWeight({handle.name!r}, shard {layout.shard_shape} of {layout.logical_shape}, rows {start}:{stop}, "
            f"rank {layout.rank} of {layout.group_size}, {dtype}, {device})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            f"{self.handle.name}: a sharded weight is bound to its runtime and process group and cannot be copied. "
            "Copy the plain model before gtp.shard_model and shard the copy, or copy values: weight.detach().clone() "
            "for this rank's rows, weight.full_tensor() for all of it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{self.handle.name}: a sharded weight holds a process group and cannot be pickled. Save "
            "model.state_dict() or gtp.full_state_dict(model)"
        )

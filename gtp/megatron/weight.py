"""`MegatronGTPWeight`: a `GTPWeight` that also answers what Megatron-Core asks of a GTP weight by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from gtp.megatron.memory import ShardMemory
from gtp.runtime.schedule import Phase
from gtp.weights.parameter import GTPWeight

_plain = torch._C.DisableTorchFunctionSubclass

_FLATTENING = (torch._C._nn.flatten_dense_tensors, torch._C._nn.unflatten_dense_tensors)


class MegatronGTPWeight(GTPWeight):
    """A sharded weight inside a Megatron-Core model.

    Megatron's local layers call a weight by a second protocol beside `gtp.protocol`, and its DistributedDataParallel,
    optimizers and checkpoints read attributes; `gtp.megatron.surface` lists every one with the place that needs it.
    Gradients go into the `main_grad` that DistributedDataParallel made, scaled to the mean over the GTP group (its sum
    under `calculate_per_token_loss`): Megatron itself scales by its replicas only.
    """

    is_gtp_weight_remat = True
    is_routed_expert = False
    weight_list: list[MegatronGTPWeight] | None = None
    # Absent neighbours tell Megatron's graph runner that a weight is complete inside the graph that runs its backward.
    next_w: MegatronGTPWeight | None = None
    prev_w: MegatronGTPWeight | None = None
    gradient_scale = 1.0  # see [Note: the scale of expert gradients]
    before_first_use: Callable[[], None] | None = None  # completes the model that the weight was built into
    lent: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # gathered, alias of it: see gtp.megatron.kept_full
    _grad_accum_hook: Callable[[], None] | None = None

    # -- Megatron's own protocol ---------------------------------------------------------------------------------

    def all_gather_and_prefetch(self, fwd: bool = True, **_: Any) -> Any:
        """The full TP-local weight `[rows, *trailing]` for a forward GEMM; a list where the group has several."""
        return self.materialize_group_for_forward() if fwd else self.materialize_group_for_backward()

    def all_gather_and_prefetch_bwd(self, **_: Any) -> Any:
        """The same for the dgrad GEMM."""
        return self.materialize_group_for_backward()

    def wgrad_reduce_scatter(self, wgrad: Any, **_: Any) -> Any:
        """Takes the full wgrad; autograd gets None, since `main_grad` receives the gradient before backward ends."""
        return self.finalize_group_grads(wgrad)

    def register_grad_accum_hook(self, _: object, hook: Callable[[], None]) -> None:
        """`hook()` runs when `main_grad` holds every contribution of a backward. One hook: the last one given."""
        self._grad_accum_hook = hook

    def get_data_tensors(self) -> tuple[MegatronGTPWeight]:
        """What offloading code may move: the shard itself."""
        return (self,)

    # -- attributes that Megatron reads --------------------------------------------------------------------------

    @property
    def gtp_remat_size(self) -> int:
        """Ranks that the weight is split over, on top of tensor parallelism."""
        return self.handle.group.size

    @property
    def pad_length(self) -> int:
        """Padding rows of the whole weight, all at its end."""
        layout = self.handle.layout
        return layout.shard_rows * self.handle.group.size - layout.rows

    @property
    def _weights(self) -> list[MegatronGTPWeight]:
        owners = [member.owner() for member in self.handle.group.members]
        return [cast(MegatronGTPWeight, owner) for owner in owners if owner is not None]

    @property
    def _debug_name(self) -> str:
        return self.handle.name

    # -- what the runtime and torch call -------------------------------------------------------------------------

    def _materialize(self, phase: Phase) -> torch.Tensor | Sequence[torch.Tensor]:
        if self.before_first_use is not None:
            self.before_first_use()
        full = super()._materialize(phase)
        if self.lent is None or not isinstance(full, torch.Tensor):
            return full
        alias = full.detach().requires_grad_(full.requires_grad)
        self.lent.append((full, alias))
        return alias

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor | None]
    ) -> torch.Tensor | Sequence[torch.Tensor | None] | None:
        """Starts reducing the full wgrads, which may be scaled in place."""
        if self.gradient_scale != 1.0:
            for wgrad in [wgrads] if isinstance(wgrads, torch.Tensor) else wgrads:
                if wgrad is not None:
                    wgrad.mul_(self.gradient_scale)
        return super().finalize_group_grads(wgrads)

    def run_gradient_hooks(self) -> None:
        """Post-accumulate-grad hooks, then the one by which Megatron learns that the gradient is ready."""
        super().run_gradient_hooks()
        if self._grad_accum_hook is not None:
            self._grad_accum_hook()

    def adopt(self, shard: torch.Tensor) -> None:
        """The transport keeps the shard in memory of its own. A shard inside DistributedDataParallel's parameter
        buffer stays there, since that is what the optimizer's all-gather fills, and is copied over at each line."""
        own = self.plain_shard()
        if own.untyped_storage().nbytes() == own.nbytes:
            super().adopt(shard)
        else:
            self.handle.member.shard = own

    def writable_shard(self) -> torch.Tensor:
        """`weight.data` and `weight.detach()`: for Megatron a plain tensor, but the weight is told before a write."""
        memory = self.plain_shard()
        return memory if self.origin.is_whole else ShardMemory.of(memory, self.handle.member.owner)

    # Gradients and optimizer state stay plain tensors: Megatron's norms, clipping and checkpoints know by
    # `is_gtp_weight_remat` that they are shards, and add over its own groups.

    def set_grad(self, grad: torch.Tensor) -> None:
        """`weight.grad = grad`, as it is."""
        with _plain():
            torch.Tensor.grad.__set__(self, grad)  # type: ignore[union-attr]

    def wrap_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """`weight.grad`, as it is."""
        return grad

    def local_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor made after the shard, as it is."""
        return tensor

    def new_state(self, fresh: torch.Tensor) -> torch.Tensor:
        """The same."""
        return fresh

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Megatron's optimizers sort parameters by the name of their tensor type, and cut or send the flattened
        # parameter. Both are about what this rank stores.
        asks_type = func is torch.Tensor.type and len(args) == 1
        flattens = func in _FLATTENING or (func is torch.Tensor.view and args[1:] == (-1,))
        if (asks_type or flattens) and not kwargs:
            with _plain():
                return func(*args)
        return super().__torch_function__(func, types, args, kwargs)

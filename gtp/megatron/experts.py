"""Expert weights whose GTP axis is not that of the dense weights: their gradients, made right.

[Note: the scale of expert gradients] Data ranks in all: replicas x dense GTP size. The loss gradient of any parameter
is the mean over them. Of an expert weight, what a rank computes is the sum over the tokens that expert parallelism sent
it, so adding over the expert GTP axis and over expert replicas gives the sum over all data ranks, whatever these axes
are. Megatron-Core 0.19 then divides by its replicas only, and over the expert GTP axis it expects a mean. That is the
mean over data ranks if the expert axis is as long as the dense one, and too small or too large by `dense size / expert
size` otherwise. With `calculate_per_token_loss` all is added, and right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from gtp.errors import GTPValueError, UnsupportedError
from gtp.megatron.weight import MegatronGTPWeight


def balance_expert_gradients(root: nn.Module) -> None:
    """Scales the gradients of expert parameters in `root` where the two GTP axes differ in size.

    Raises:
        GTPValueError: see `refuse_overlapping_axes`.
        UnsupportedError: a gradient that has to be scaled would bypass autograd.
    """
    dense, expert = gtp_axes()
    for name, weight in root.named_parameters():
        if isinstance(weight, MegatronGTPWeight):
            refuse_overlapping_axes(name, weight)
    experts = list(_expert_parameters(root))
    sizes = [group.size() if group is not None else 1 for group in (dense, expert)]
    if not experts or sizes[0] == sizes[1] or per_token_loss(root):
        return
    factor = sizes[1] / sizes[0]
    for name, parameter in experts:
        if isinstance(parameter, MegatronGTPWeight):
            parameter.gradient_scale = factor
        elif parameter.requires_grad:
            if _fuses_wgrads(root):
                raise UnsupportedError(
                    f"{name}: gradient_accumulation_fusion=True with expert weights sharded {sizes[1]} ways over GTP "
                    f"and dense ones {sizes[0]} ways. Turn it off, or make both counts equal"
                )
            parameter.register_hook(_Scale(factor))


class _Scale:
    """A tensor hook: the gradient times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * self._factor


def gtp_axes() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The dense and the expert GTP group of this rank, as Megatron's globals have them."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_gtp_weight_remat_group(check_initialized=False),
        parallel_state.get_expert_gtp_weight_remat_group(check_initialized=False),
    )


def refuse_overlapping_axes(name: str, weight: MegatronGTPWeight) -> None:
    """Without expert groups Megatron reduces an expert weight like a dense one, so its shards must lie alike.

    Raises:
        GTPValueError: they do not.
    """
    if not getattr(weight, "allreduce", True):
        return
    dense, _ = gtp_axes()
    wanted = dist.get_process_group_ranks(dense) if dense is not None else [dist.get_rank()]
    ranks = dist.get_process_group_ranks(weight.group)
    if ranks != wanted:
        raise GTPValueError(
            f"{name}: an expert weight sharded over ranks {ranks}, while without expert parallelism Megatron reduces "
            f"its gradient like that of dense weights, sharded over {wanted}. Set "
            "expert_tensor_parallel_num_weight_shards like tensor_parallel_num_weight_shards, or use "
            "expert_model_parallel_size above 1"
        )


def _expert_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that Megatron reduces over expert groups."""
    for name, parameter in root.named_parameters():
        if not getattr(parameter, "allreduce", True):
            yield name, parameter


def per_token_loss(model: nn.Module) -> bool:
    """`calculate_per_token_loss` of the config that Megatron's DistributedDataParallel and schedules go by: that of the
    model itself, whatever its parts have; of a model without one, any."""
    owners = [model] if hasattr(model, "config") else model.modules()
    return any(getattr(getattr(owner, "config", None), "calculate_per_token_loss", False) for owner in owners)


def _fuses_wgrads(root: nn.Module) -> bool:
    return any(getattr(getattr(m, "config", None), "gradient_accumulation_fusion", False) for m in root.modules())

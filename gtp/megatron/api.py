"""What stands behind `megatron.core.tensor_parallel.gtp_api` while gtp is installed, one function or class per name."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gtp.config import GTPConfig
from gtp.errors import GTPValueError, UnsupportedError
from gtp.megatron import building
from gtp.megatron.checkpoint import sharded_tensors
from gtp.megatron.experts import refuse_overlapping_axes
from gtp.megatron.kept_full import let_go_after_forward
from gtp.megatron.refusals import refuse_settings
from gtp.megatron.saved_tensors import refuse_hooks_around
from gtp.megatron.tied import accept_supplied_weight
from gtp.megatron.weight import MegatronGTPWeight
from gtp.ops.compilers import never_compiled
from gtp.weights.layout import ShardLayout
from gtp.weights.shard import take_shard


class GTPChain(enum.Enum):
    """Megatron's names for weights used inside and outside of CUDA graphs."""

    GRAPHED = "GRAPHED"
    UNGRAPHED = "UNGRAPHED"


class GTPEmbeddingWeight(torch.autograd.Function):
    """The full TP-local embedding matrix `[rows, hidden]` of a shard, differentiable.

    forward: materialize. backward: finalize with the dense gradient of the table; no re-gather, since a lookup does not
    multiply by the weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: MegatronGTPWeight) -> torch.Tensor:
        ctx.weight = weight
        full: torch.Tensor = weight.all_gather_and_prefetch(fwd=True)
        return full

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.weight.wgrad_reduce_scatter(grad)


def is_gtp_param(value: object) -> bool:
    """Whether `value` is a weight of ours. Any object may be asked."""
    return isinstance(value, MegatronGTPWeight)


def dequantize_gtp_native_fp8(weight: MegatronGTPWeight) -> torch.Tensor:
    """A plain copy of the shard. Megatron asks only where a weight is stored in FP8, and ours are not."""
    return weight.plain_shard().clone()


def wait_for_gtp_grad_reduction_on_current_stream() -> None:
    """Nothing is left to wait for: gradients are complete, and Megatron's hooks have run, when backward returns."""


def wait_async_comms(chain_id: str | None = None, skip_rs: bool = False, finalize_after_drain: bool = False) -> None:
    """Nothing to drain between a backward's end and the next forward; captures are refused."""


def get_side_stream(chain_id: str, group: dist.ProcessGroup) -> torch.cuda.Stream:
    """The stream that Megatron's graph runner waits for. Ours join the current stream by themselves."""
    return torch.cuda.current_stream()


def set_cuda_graph_mempool(device: Any, pool: Any) -> None:
    """gtp allocates nothing for Megatron's CUDA graphs, which it refuses (`classify_gtp_remat_chains`)."""


@contextlib.contextmanager
def gtp_native_fp8_load_context(module: nn.Module) -> Any:
    """Around `load_state_dict`. Ours needs no preparation: the weights are not stored in FP8."""
    yield


def configure_gtp_remat_from_recipe(
    *, fp4: bool, fp8_recipe: str | None, fp8: bool, calculate_per_token_loss: bool
) -> None:
    """Megatron's training loop announces its precision before it builds the model.

    The loss normalization is read from each model's own config, so nothing is remembered.

    Raises:
        UnsupportedError: FP8 or FP4 training.
    """
    refuse_settings(types.SimpleNamespace(fp8=f"recipe {fp8_recipe}" if fp8 else None, fp4=fp4))


def classify_gtp_remat_chains(
    model: Sequence[nn.Module] | nn.Module,
    *,
    cuda_graph_modules: Any,
    moe_shared_expert_overlap: bool,
    cuda_graph_impl: str,
) -> None:
    """Megatron sorts weights into prefetch chains by name here; gtp's schedule learns the order from what happens.

    Raises:
        UnsupportedError: Megatron's CUDA graphs are on.
    """
    refuse_settings(types.SimpleNamespace(cuda_graph_impl=cuda_graph_impl))


class Wrapping:
    """The names that turn parameters of a module under construction into sharded weights.

    Args:
        config: Settings of every runtime that is made.
    """

    def __init__(self, config: GTPConfig) -> None:
        self._config = config

    def gtp_remat_shard_dim0(self, dim0: int, group: dist.ProcessGroup) -> tuple[int, int]:
        """Rows per rank and padding rows in all, for a weight of `dim0` rows."""
        layout = ShardLayout((dim0, 1), group.size(), 0, self._config.alignment)
        return layout.shard_rows, layout.shard_rows * group.size() - dim0

    def wrap_module_params_gtp(
        self,
        module: nn.Module,
        weight_names: Sequence[str],
        gtp_remat_group: dist.ProcessGroup,
        is_grouped: bool | None = None,
    ) -> None:
        """Shards full weights of `module`, built with equal values on every rank of the group, in place.

        Weights of a grouped module are gathered together. A name whose weight is None is an output layer that will be
        handed the embedding's weight.
        """
        names = [name for name in weight_names if module._parameters.get(name) is not None]
        if not names:
            if hasattr(module, "output_size_per_partition"):
                accept_supplied_weight(module)
            return
        shards = []
        for name in names:
            full = _full_weight(module, name)
            layout = ShardLayout(
                tuple(full.shape), gtp_remat_group.size(), gtp_remat_group.rank(), self._config.alignment
            )
            shards.append((layout, take_shard(full, layout, building.device_for(full, gtp_remat_group))))
        for weight in self._adopt(module, names, shards, gtp_remat_group, grouped=bool(is_grouped)):
            refuse_overlapping_axes(weight.name, weight)

    def attach_gtp_to_presharded_module(
        self, module: nn.Module, gtp_remat_group: dist.ProcessGroup, pad_length: int, is_grouped: bool = False
    ) -> None:
        """Adopts weights that a Transformer Engine module built at shard size, `pad_length` padding rows in all.

        Its biases were built at that size, too, and are whole afterwards: `[rows]` zeros, which Transformer Engine
        starts them with.

        Raises:
            UnsupportedError: the module's config asks for `use_cpu_initialization` or `cpu_offloading`.
        """
        _refuse_cpu_initialization(module)
        names = _grouped_names(module) if is_grouped else list(getattr(module, "weight_names", None) or ["weight"])
        shards = []
        for name in names:
            shard = _full_weight(module, name)
            rows = shard.shape[0] * gtp_remat_group.size() - pad_length
            layout = ShardLayout(
                (rows, *shard.shape[1:]), gtp_remat_group.size(), gtp_remat_group.rank(), self._config.alignment
            )
            if layout.shard_rows != shard.shape[0]:
                raise GTPValueError(
                    f"{type(module).__name__}.{name}: a shard of {shard.shape[0]} rows with {pad_length} padding rows "
                    f"over {gtp_remat_group.size()} ranks is not what gtp_remat_shard_dim0({rows}) gives, which is "
                    f"{layout.shard_rows}"
                )
            shards.append((layout, shard))
            bias = module._parameters.get(name.replace("weight", "bias"))
            if bias is not None:
                bias.data = bias.data.new_zeros(rows)  # stays the object that carries Megatron's attributes
        refuse_hooks_around(module)
        for weight in self._adopt(module, names, shards, gtp_remat_group, grouped=is_grouped):
            weight.clear_padding()
            let_go_after_forward(module, weight)

    def _adopt(
        self,
        module: nn.Module,
        names: Sequence[str],
        shards: Sequence[tuple[ShardLayout, torch.Tensor]],
        group: dist.ProcessGroup,
        *,
        grouped: bool,
    ) -> list[MegatronGTPWeight]:
        root = building.root_under_construction(module)
        for owner in (root, module):
            refuse_settings(getattr(owner, "config", None))
        runtime = building.runtime_for(root, self._config, group, shards[0][1].device)
        if grouped:
            weights = building.adopt(root, module, names, shards, runtime, group)
            for weight in weights:
                weight.is_routed_expert = True
            weights[0].weight_list = weights
            return weights
        return [
            building.adopt(root, module, [name], [shard], runtime, group)[0]
            for name, shard in zip(names, shards, strict=True)
        ]


def names_behind_the_flag(config: GTPConfig) -> dict[str, Any]:
    """Every name of `gtp_api`, served by gtp."""
    wrapping = Wrapping(config)
    own: dict[str, Callable[..., Any] | type] = {
        "GTPChain": GTPChain,
        "GTPEmbeddingWeight": GTPEmbeddingWeight,
        "attach_gtp_to_presharded_module": wrapping.attach_gtp_to_presharded_module,
        "classify_gtp_remat_chains": classify_gtp_remat_chains,
        "configure_gtp_remat_from_recipe": configure_gtp_remat_from_recipe,
        "dequantize_gtp_native_fp8": dequantize_gtp_native_fp8,
        "get_ag_stream": get_side_stream,
        "get_rs_stream": get_side_stream,
        "gtp_native_fp8_load_context": gtp_native_fp8_load_context,
        "gtp_remat_shard_dim0": wrapping.gtp_remat_shard_dim0,
        "is_gtp_param": is_gtp_param,
        "make_sharded_tensors_for_checkpoint_with_gtp_remat": sharded_tensors,
        "set_cuda_graph_mempool": set_cuda_graph_mempool,
        "wait_async_comms": wait_async_comms,
        "wait_for_gtp_grad_reduction_on_current_stream": wait_for_gtp_grad_reduction_on_current_stream,
        "wrap_module_params_gtp": wrapping.wrap_module_params_gtp,
    }
    return {"HAVE_GTP": True, **own}


def _full_weight(module: nn.Module, name: str) -> torch.Tensor:
    parameter = module._parameters.get(name)
    if parameter is None:
        raise GTPValueError(f"{type(module).__name__} has no weight {name!r} to shard")
    if isinstance(parameter, MegatronGTPWeight):
        raise GTPValueError(f"{type(module).__name__}.{name} is sharded already")
    if type(parameter) is not nn.Parameter:
        raise UnsupportedError(
            f"{type(module).__name__}.{name} is a {type(parameter).__name__}: gtp shards plain parameters. Weights "
            "stored in FP8 need Megatron's own implementation"
        )
    if parameter.is_meta:
        raise UnsupportedError(
            f"{type(module).__name__}.{name} is on the meta device, and Megatron would fill it when it is sharded "
            "already. Turn init_model_with_meta_device off: each weight is cut as soon as it is built, so a rank never "
            "holds more than one whole"
        )
    return parameter.detach()


def _refuse_cpu_initialization(module: nn.Module) -> None:
    if getattr(getattr(module, "config", None), "use_cpu_initialization", False):
        raise UnsupportedError(
            f"use_cpu_initialization=True with tensor_parallel_num_weight_shards: {type(module).__name__} would fill "
            "its weight, which is a shard already, with the rows of all shards. Turn it off, or use the local layer "
            "spec"
        )


def _grouped_names(module: Any) -> list[str]:
    return list(getattr(module, "weight_names", None) or [f"weight{i}" for i in range(module.num_gemms)])

"""Settings of Megatron that gtp does not serve, refused by name where they are first seen.

Those of a model when its first weight is handed over, settings of an optimizer when it is made: `WRAPPERS` stand before
two functions that every optimizer of Megatron comes from, and before the planning of copies between models.
`METHOD_WRAPPERS` stand before what would shard the shards once more. Layers that cannot work: `gtp.megatron.foreign`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from gtp.errors import GTPStateError, UnsupportedError
from gtp.megatron.experts import gtp_axes
from gtp.megatron.weight import MegatronGTPWeight
from gtp.weights.layout import ShardLayout

_NO_QUANTIZED: Final = (
    "gtp gathers Megatron's weights in their own dtype and does not quantize them. Train in bf16, or leave gtp out and "
    "use Megatron's own implementation with Transformer Engine"
)
_NO_GRAPHS: Final = "gtp does not run under Megatron's CUDA graph runner. Leave it out"
_NO_DELAYED_WGRAD: Final = (
    "a weight gradient that is computed later than its backward would never be reduced over the GTP ranks. Turn it off"
)
_NO_STACK: Final = "it makes one tensor of what gtp shards expert by expert. Turn it off"

_MODEL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fp8": _NO_QUANTIZED,
        "fp4": _NO_QUANTIZED,
        "quant_recipe": _NO_QUANTIZED,
        "cuda_graph_impl": _NO_GRAPHS,
        "enable_cuda_graph": _NO_GRAPHS,
        "external_cuda_graph": _NO_GRAPHS,
        "delay_wgrad_compute": _NO_DELAYED_WGRAD,
        "overlap_dispatch_backward_with_experts_wgrad": _NO_DELAYED_WGRAD,
        "defer_embedding_wgrad_compute": _NO_DELAYED_WGRAD,
        "moe_single_grouped_weight": _NO_STACK,
        "moe_single_grouped_bias": _NO_STACK,
        "qk_clip": "it scales heads of the whole QKV matrix, of which a rank stores rows. Turn it off",
    }
)
"""Field of `TransformerConfig` to why it must stay off."""

ELEMENTWISE: Final = frozenset({"laprop", "lion"})
"""Emerging optimizers whose update of an element needs that element alone."""

WHOLE_MATRIX: Final = frozenset({"muon"})
"""Those for which gtp gathers the matrix, see `gtp.megatron.whole_matrix`."""


def refuse_settings(config: object) -> None:
    """Checks a model's config.

    Args:
        config: A `TransformerConfig`; whatever lacks the fields passes.

    Raises:
        UnsupportedError: a setting is on that would give wrong numbers, or fail later. The message names it.
    """
    for name, why in _MODEL.items():
        value = getattr(config, name, None)
        if value not in (None, False, "none"):
            raise UnsupportedError(f"{name}={value!r} with tensor_parallel_num_weight_shards: {why}")


_AXES: Final = (
    ("gtp_weight_remat_size", "tensor_parallel_num_weight_shards", "gtp_remat_size"),
    ("expert_gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards", "expert_gtp_remat_size"),
)
"""Of the dense and of the expert axis: the field with the ranks a config asks for, the setting, and the argument of
`initialize_model_parallel`."""


def refuse_other_axes(config: object) -> None:
    """Checks that the GTP axes a config asks for are up, since Megatron shards over the axes that are.

    Args:
        config: A `TransformerConfig`; whatever lacks the fields passes, and so do its defaults.

    Raises:
        GTPStateError: an axis has another size, and weights would be whole or sharded otherwise than asked for.
    """
    axes = _AXES if getattr(config, "num_moe_experts", None) else _AXES[:1]
    for (field, setting, argument), axis in zip(axes, gtp_axes(), strict=False):
        asked, found = getattr(config, field, 1), axis.size() if axis is not None else 1
        if asked not in (1, found):
            raise GTPStateError(
                f"{setting}={getattr(config, setting)} asks for a GTP axis of {asked} ranks, and there is one of "
                f"{found}, over which Megatron would shard. Call parallel_state.initialize_model_parallel("
                f"{argument}={asked}) before the model is built"
            )


def _known_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `_create_emerging_optimizer`: what looks at a matrix would see this rank's rows of it; and as
    `_countable_zeros`, which does not see these parameters."""

    @functools.wraps(original)
    def create(config: Any, param_groups: Any, eopt_name: str, model_chunks: Any, *args: Any, **options: Any) -> Any:
        if eopt_name not in ELEMENTWISE | WHOLE_MATRIX:
            for name, weight in _sharded(param_groups, model_chunks):
                served = ", ".join(map(repr, sorted({"adam", "sgd"} | ELEMENTWISE | WHOLE_MATRIX)))
                raise UnsupportedError(
                    f"optimizer={eopt_name!r}: it is not known to update {name}, of which this rank holds "
                    f"{tuple(weight.layout.shard_shape)} of {tuple(weight.logical_shape)}, as it would update the "
                    f"whole matrix. With sharded weights use one of {served}"
                )
        if config.log_num_zeros_in_grad:
            _refuse_padding(param_groups, model_chunks)
        return original(config, param_groups, eopt_name, model_chunks, *args, **options)

    return create


def _countable_zeros(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `_get_megatron_optimizer_based_on_param_groups`: padding would count as zeros of the gradient."""

    @functools.wraps(original)
    def make(config: Any, model_chunks: Any, param_groups: Any, *args: Any, **options: Any) -> Any:
        if config.log_num_zeros_in_grad:
            _refuse_padding(param_groups, model_chunks)
        return original(config, model_chunks, param_groups, *args, **options)

    return make


def _refuse_padding(param_groups: Iterable[Mapping[str, Any]], model_chunks: Iterable[nn.Module]) -> None:
    for name, weight in _sharded(param_groups, model_chunks):
        if weight.pad_length:
            raise UnsupportedError(
                f"log_num_zeros_in_grad=True: {name} has {weight.pad_length} rows of padding over "
                f"{weight.gtp_remat_size} GTP ranks, which would be counted as zeros. Turn it off, or choose sizes and "
                "GTPConfig(alignment=...) such that the rows of every weight divide"
            )


def _not_sharded_already(original: Callable[..., None]) -> Callable[..., None]:
    """Before a wrapper of Megatron that shards parameters over data ranks."""

    @functools.wraps(original)
    def __init__(wrapper: Any, config: Any, ddp_config: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, MegatronGTPWeight):
                raise UnsupportedError(
                    f"{type(wrapper).__name__} of Megatron: {name} is sharded by tensor_parallel_num_weight_shards and "
                    "would be sharded once more. Use DistributedDataParallel, which with "
                    "DistributedDataParallelConfig(use_distributed_optimizer=True) shards the optimizer's state"
                )
        original(wrapper, config, ddp_config, module, *args, **options)

    return __init__


def _shards_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before `build_local_reshard_plan` of `megatron.core.resharding`, which takes a rank's rows for its TP slice."""

    @functools.wraps(original)
    def plan(src_module: nn.Module | None, dst_module: nn.Module | None, *args: Any, **options: Any) -> Any:
        source, target = _layouts(src_module), _layouts(dst_module)
        for name in sorted(source.keys() | target.keys()):
            if source.get(name) != target.get(name):
                raise UnsupportedError(
                    f"swap_model_weights of megatron.core.resharding: {name} is sharded by "
                    "tensor_parallel_num_weight_shards otherwise in the source than in the target, or in one of them "
                    "only, and rows would be taken for other rows. Copy between models of one layout, or through "
                    "megatron.core.dist_checkpointing, whose files any layout can load"
                )
        return original(src_module, dst_module, *args, **options)

    return plan


def _layouts(module: nn.Module | None) -> dict[str, ShardLayout]:
    named = module.named_parameters() if module is not None else ()
    return {name: p.layout for name, p in named if isinstance(p, MegatronGTPWeight)}


def _sharded(
    param_groups: Iterable[Mapping[str, Any]], model_chunks: Iterable[nn.Module]
) -> Iterator[tuple[str, MegatronGTPWeight]]:
    """Names and weights in the groups. A weight itself knows its name only after the model's first forward."""
    names = {p: name for chunk in model_chunks for name, p in chunk.named_parameters()}
    for group in param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, MegatronGTPWeight):
                yield names.get(parameter, parameter.name).removeprefix("module."), parameter


WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {
        "_create_emerging_optimizer": _known_optimizer,
        "_get_megatron_optimizer_based_on_param_groups": _countable_zeros,
        "build_local_reshard_plan": _shards_alike,
    }
)
"""Name of a function of Megatron to what makes its replacement from it."""

METHOD_WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = MappingProxyType(
    {
        "FullyShardedDataParallel.__init__": _not_sharded_already,
        "TorchFullyShardedDataParallel.__init__": _not_sharded_already,
    }
)
"""Method of Megatron to what makes its replacement from it."""

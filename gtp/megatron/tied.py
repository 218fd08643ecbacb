"""Tied embeddings: an output layer that is handed the embedding's sharded weight, or its copy of it, at each call."""

from __future__ import annotations

from typing import Any

from torch import nn

from gtp.megatron.frozen import Detached
from gtp.megatron.memory import ShardMemory
from gtp.megatron.weight import MegatronGTPWeight


def accept_supplied_weight(module: nn.Module) -> None:
    """Makes a `ColumnParallelLinear` take a sharded weight, or its `detach()`, in `forward(input_, weight=...)`.

    Megatron compares the shape of a supplied weight with the full TP-local shape, and a shard has fewer rows. So a
    sharded weight whose logical shape fits is put where the layer looks for its own, for the time of the call; a layer
    without a parameter still owns none. Anything else reaches Megatron's check as it is.
    """

    def before(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        supplied = _sharded(args[1] if len(args) > 1 else kwargs.get("weight"))
        weight = supplied.weight if isinstance(supplied, Detached) else supplied
        if weight is None or tuple(weight.logical_shape) != _expected(layer):
            return args, kwargs
        layer.__dict__["weight"] = supplied
        if len(args) > 1:
            return (args[0], None, *args[2:]), kwargs
        return args, {**kwargs, "weight": None}

    def after(layer: nn.Module, args: Any, output: Any) -> None:
        if "weight" in layer._parameters:
            layer.__dict__.pop("weight", None)
        else:
            layer.__dict__["weight"] = None

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def accept_supplied_weights(root: nn.Module) -> None:
    """The same for the output layers in `root` that own a weight: they are handed that of an embedding to which theirs
    is tied, of another pipeline stage or not, or their own without a gradient (`mtp_detach_heads`)."""
    for module in root.modules():
        layer = getattr(module, "output_layer", None)
        if isinstance(layer, nn.Module) and isinstance(layer._parameters.get("weight"), MegatronGTPWeight):
            accept_supplied_weight(layer)


def _sharded(supplied: object) -> MegatronGTPWeight | Detached | None:
    """What `supplied` is of a sharded weight, if it is all of it that is here."""
    if isinstance(supplied, ShardMemory):
        weight = supplied.owner()
        whole = weight is not None and supplied.shape == weight.shape and supplied.data_ptr() == weight.data_ptr()
        return Detached(weight) if whole else None
    return supplied if isinstance(supplied, MegatronGTPWeight) else None


def _expected(layer: nn.Module) -> tuple[int, int]:
    return (int(layer.output_size_per_partition), int(layer.input_size))  # type: ignore[arg-type]

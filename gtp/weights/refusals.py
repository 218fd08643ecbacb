"""Models and parameters that `shard_model` cannot take, found out before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gtp.errors import GTPStateError, GTPValueError, UnsupportedError
from gtp.protocol import is_distributed_weight
from gtp.runtime.replicated import refuse_other_owner


def refuse_models(model: nn.Module) -> None:
    """
    Raises:
        GTPValueError: it is no module, or a module has sparse gradients.
        GTPStateError: it is wrapped in DistributedDataParallel, or a part of it is.
    """
    if not isinstance(model, nn.Module):
        raise GTPValueError(
            f"gtp.shard_model takes an nn.Module, got {type(model).__name__}. Several modules that are trained "
            "together are one: nn.ModuleList([...])"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise GTPStateError(
                f"{name or 'the model'}: it is wrapped in DistributedDataParallel, which reduces gradients that "
                "gtp.shard_model would reduce, too. Shard the plain module (wrapper.module), and leave the wrapper away"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise GTPValueError(
                f"{name or 'the model'}: {type(module).__name__}(sparse=True) has sparse gradients, and gtp reduces "
                "dense ones. Set sparse=False; the optimizer then is an ordinary one, not SparseAdam"
            )


def refuse_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """
    Raises:
        GTPValueError: a parameter has no shape yet, or is distributed by another library.
        GTPStateError: it is sharded already, belongs to another sharded model, or has hooks on the meta device.
    """
    for name, parameter in parameters:
        if nn.parameter.is_lazy(parameter):
            raise GTPValueError(
                f"{name} has no shape yet: it belongs to a lazy module (nn.LazyLinear and the like). Run one "
                "forward of the model, which gives it its shape, before gtp.shard_model and before the optimizer is "
                "made"
            )
        if is_distributed_weight(parameter):
            raise GTPStateError(
                f"{name} is sharded already. Shard a model once, from its root; give different axes to different "
                "weights with a mapping from name pattern to group"
            )
        refuse_other_owner(name, parameter)
        kind = type(parameter).__name__
        if (
            kind in ("DTensor", "FlatParameter")
            or hasattr(parameter, "_fsdp_param")
            or hasattr(parameter, "placements")
        ):
            raise GTPValueError(
                f"{name} is a {kind}: it is distributed by another library (FSDP, tensor parallel DTensor). gtp "
                "shards plain parameters; apply gtp.shard_model to the plain model, and a mesh (replicate, gtp) for "
                "more ranks"
            )
        refuse_tensor_class(name, parameter)


def refuse_tensor_class(name: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        GTPValueError: it is of a class whose memory is not its values (quantized, masked, fake).
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise GTPValueError(
            f"{name} is a {kind.__name__}, a tensor class that answers torch's operations by itself (quantized, "
            "masked, fake, ...). gtp broadcasts and cuts plain memory: make it a plain parameter or buffer before "
            "gtp.shard_model"
        )


def refuse_to_shard(name: str, parameter: nn.Parameter) -> None:
    """What only a parameter that is to be sharded cannot be.

    Raises:
        GTPValueError: it is of a class of its own, or an inference tensor.
        UnsupportedError: a hook is registered on it that would not run as it does now.
    """
    if type(parameter) is not nn.Parameter:
        raise GTPValueError(
            f"{name} is a {type(parameter).__name__}: sharding would make it a GTPWeight, and what its class does "
            "would be gone. Make it a plain nn.Parameter before gtp.shard_model, or leave it whole with exclude="
        )
    if parameter.is_inference():
        raise GTPValueError(
            f"{name}: it was made under torch.inference_mode and can never be trained; build the model outside"
        )
    if parameter._backward_hooks:
        raise refused_hook(f"{name}: it has a hook of register_hook, which would")


def refused_hook(what: str) -> UnsupportedError:
    """The error of gradient hooks on weights, with what to use."""
    return UnsupportedError(
        f"{what} never be called, because the gradient of a sharded weight is reduced outside autograd. Use "
        "register_post_accumulate_grad_hook, which may change weight.grad in place. A weight that was given to "
        "sum_gradients_over_tp is left out there and used outside of the split sequence (gtp.ops.gather_sequence), or "
        "kept replicated with gtp.shard_model(exclude=...)"
    )


class Held(NamedTuple):
    """A parameter or buffer of a model, under its name."""

    name: str
    tensor: torch.Tensor
    sharded: bool


def refuse_shared_memory(tensors: Iterable[Held]) -> None:
    """Distinct tensors over one memory are a tie that sharding one of them would end without a word.

    Raises:
        GTPValueError: a tensor that is to be sharded shares memory with another one.
    """
    spans = []
    for held in tensors:
        tensor = held.tensor
        if not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
            start = tensor.data_ptr()
            length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((start, start + length * tensor.itemsize, held))
    spans.sort(key=lambda span: span[0])
    open_spans: list[tuple[int, int, Held]] = []
    for start, stop, held in spans:
        open_spans = [span for span in open_spans if span[1] > start]
        for other_start, _, other in open_spans:
            # columns of one matrix lie between each other and share nothing
            surely = start == other_start or (held.tensor.is_contiguous() and other.tensor.is_contiguous())
            if surely and (held.sharded or other.sharded):
                raise GTPValueError(
                    f"{held.name} and {other.name} are two tensors over the same memory (a view, or .data of one given "
                    "to the other). Sharded, each would be on its own. Tie parameters as one object (head.weight = "
                    "table.weight), clone what is not to be tied, or leave both whole with exclude="
                )
        open_spans.append((start, stop, held))

"""Models and parameters that `shard_model` cannot take, found out before anything changes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gtp.errors import GTPStateError, GTPValueError
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
        GTPStateError: it is sharded already, or belongs to another sharded model.
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

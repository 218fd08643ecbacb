"""`FusedParameters`: one parameter in memory, several in checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gtp.errors import GTPValueError
from gtp.protocol import is_distributed_weight


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a fused parameter that has a name of its own in checkpoints.

    Attributes:
        parameter: Name of the fused parameter.
        saved: Name in the state dict, relative to the module.
        view: The piece's place in the fused tensor, a view.
        leading_dims: How many leading dims of that view are one dim in the checkpoint.
    """

    parameter: str
    saved: str
    view: Callable[[torch.Tensor], torch.Tensor]
    leading_dims: int


class FusedParameters(nn.Module):
    """Saves fused parameters in parts, as the unfused modules would be saved, and loads either form.

    Parts are views of the parameter where their strides allow, so loading in place into a state dict reaches it; where
    they do not, they are copies, and such a state dict has to be handed to `load_state_dict`. A parameter that is
    distributed itself is saved whole, under its own name: its rows are not all here.

    Attributes of the parts' names (`block.w1.weight`) are there too, as views of the parameter, as long as state dicts
    have them: torch.distributed.checkpoint.state_dict follows the names of a state dict through the model.
    """

    def fused_parts(self) -> list[Part]:
        """How each fused parameter divides; its parts cover it."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for part in self.fused_parts():
            fused = getattr(self, part.parameter)
            if _is_spread(fused):
                continue
            destination.pop(prefix + part.parameter, None)
            view = part.view(fused if keep_vars else fused.detach())
            destination[prefix + part.saved] = view.flatten(0, part.leading_dims - 1) if part.leading_dims > 1 else view

    def saved_parts(self, name: str) -> SimpleNamespace:
        """What a state dict has under `name`, as its attributes (`weight`, `bias`).

        Raises:
            AttributeError: a state dict does not have it, because the parameter is distributed.
        """
        found = SimpleNamespace()
        for part in self.fused_parts():
            module, _, attribute = part.saved.rpartition(".")
            fused = getattr(self, part.parameter)
            if module == name and not _is_spread(fused):
                setattr(found, attribute, part.view(fused).flatten(0, part.leading_dims - 1))
        if not vars(found):
            raise AttributeError(name)
        return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *arguments: Any,
    ) -> None:
        for name in dict.fromkeys(part.parameter for part in self.fused_parts()):
            missing_keys += self._fuse(state_dict, prefix, name)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *arguments)

    def _fuse(self, state_dict: dict[str, Any], prefix: str, name: str) -> list[str]:
        """Replaces the parts of one parameter in `state_dict`, if there are any, by the fused tensor.

        Returns:
            Names of parts that are missing; they keep their values.
        """
        parts = [part for part in self.fused_parts() if part.parameter == name]
        present = [part for part in parts if prefix + part.saved in state_dict]
        if not present:
            return []
        if prefix + name in state_dict:
            raise GTPValueError(
                f"the state dict has both {prefix}{name} and {prefix}{present[0].saved}, which are the same weight in "
                "two layouts: remove one"
            )
        parameter = getattr(self, name)
        if _is_spread(parameter):
            raise GTPValueError(
                f"{prefix}{name} is sharded and cannot take the parts {', '.join(p.saved for p in present)}: load them "
                "before gtp.shard_model"
            )
        missing = [prefix + part.saved for part in parts if part not in present]
        given = [state_dict[prefix + part.saved] for part in present]
        # with assign=True, what is fused here becomes the parameter
        dtype = functools.reduce(torch.promote_types, [t.dtype for t in given])
        fused = torch.empty(parameter.shape, dtype=dtype, device=given[0].device)
        if missing:
            if parameter.is_meta:
                raise GTPValueError(
                    f"{prefix}{name} is on the meta device and takes all of its parts at once; {', '.join(missing)} "
                    "are missing"
                )
            fused = parameter.detach().clone()
        for part in present:
            value, place = state_dict.pop(prefix + part.saved), part.view(fused)
            wanted = place.shape[: part.leading_dims].numel(), *place.shape[part.leading_dims :]
            if tuple(value.shape) != wanted:
                raise GTPValueError(f"{prefix}{part.saved} must be {wanted}, got {tuple(value.shape)}")
            place.copy_(value.detach().view(place.shape))
        state_dict[prefix + name] = fused
        return missing


def _is_spread(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of the parameter only: a `DistributedWeight`, or FSDP's DTensor."""
    return is_distributed_weight(parameter) or isinstance(parameter, DTensor)

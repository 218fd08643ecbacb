"""`FusedParameters`: one parameter in memory, several in checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name in dict.fromkeys(part.parameter for part in self.fused_parts()):
            self._fuse(state_dict, prefix, name)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _fuse(self, state_dict: dict[str, Any], prefix: str, name: str) -> None:
        """Replaces the parts of one parameter in `state_dict`, if all are there, by the fused tensor."""
        parts = [part for part in self.fused_parts() if part.parameter == name]
        present = [part for part in parts if prefix + part.saved in state_dict]
        if not present:
            return
        if prefix + name in state_dict:
            raise GTPValueError(
                f"the state dict has both {prefix}{name} and {prefix}{present[0].saved}, which are the same weight in "
                "two layouts: remove one"
            )
        if len(present) < len(parts):
            return  # reported as missing by load_state_dict, by the name of the fused parameter
        parameter = getattr(self, name)
        if _is_spread(parameter):
            raise GTPValueError(
                f"{prefix}{name} is sharded and cannot take the parts {', '.join(p.saved for p in parts)}: load them "
                "before gtp.shard_model"
            )
        fused = torch.empty_like(parameter, device=state_dict[prefix + present[0].saved].device)
        for part in parts:
            given, place = state_dict.pop(prefix + part.saved), part.view(fused)
            wanted = place.shape[: part.leading_dims].numel(), *place.shape[part.leading_dims :]
            if tuple(given.shape) != wanted:
                raise GTPValueError(f"{prefix}{part.saved} must be {wanted}, got {tuple(given.shape)}")
            place.copy_(given.detach().view(place.shape))
        state_dict[prefix + name] = fused


def _is_spread(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of the parameter only: a `DistributedWeight`, or FSDP's DTensor."""
    return is_distributed_weight(parameter) or isinstance(parameter, DTensor)

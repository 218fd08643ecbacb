"""What is known of modules: which of their parameters they use by ops that gather, and which no shard can stand for."""

from __future__ import annotations

import torch
from torch import nn

from gtp.weights.unshard import is_holder

NOT_SERVED = "is not the weight of a Linear or Embedding"


def weight_groups_of(module: nn.Module) -> list[list[str]]:
    """The parameter names of `module` that its op uses together, from its method `weight_groups()`, if it has one."""
    method = getattr(module, "weight_groups", None)
    return [list(group) for group in method()] if callable(method) else []


def is_served(owner: nn.Module, attribute: str) -> bool:
    """Whether the module computes with this parameter by an op that gathers it."""
    if any(attribute in group for group in weight_groups_of(owner)):
        return True
    return attribute == "weight" and isinstance(owner, (nn.Linear, nn.Embedding)) and not is_holder(owner)


def gathers_itself(owner: nn.Module, attribute: str) -> bool:
    """Whether it is known that all the module does with this parameter is such an op: a Linear, or a subclass, that was
    given a forward of its own may do otherwise."""
    own_forward = "forward" in vars(owner) or type(owner).forward not in (nn.Linear.forward, nn.Embedding.forward)
    return is_served(owner, attribute) and not (isinstance(owner, (nn.Linear, nn.Embedding)) and own_forward)


def obstacle_of(owner: nn.Module, attribute: str, unshard: bool) -> str:
    """Why the module could not compute with a shard of this parameter; "" where nothing is known against it.

    Args:
        unshard: Whether it gets the full one during its forward.
    """
    kind = type(owner).__name__
    if isinstance(owner, torch.jit.ScriptModule):
        return "torch.jit.script compiled its module, which does not ask Python for its parameters"
    if isinstance(owner, nn.RNNBase) and unshard:
        return f"{kind} keeps a list of its own of its parameters"
    if is_holder(owner) and isinstance(owner, nn.Linear) and not unshard:
        return "nn.MultiheadAttention passes it to a fused function that gtp does not serve"
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None:
        return f"nn.{kind} with max_norm rescales rows of it in forward"
    if unshard and _is_read_by_hook(owner, attribute):
        return "torch.nn.utils computes from it in a hook, before the forward; use torch.nn.utils.parametrizations"
    if type(owner).__module__.startswith("torch.nn.modules.") and not unshard and not is_served(owner, attribute):
        return f"{attribute} of {kind} {NOT_SERVED}"
    return ""


def _is_read_by_hook(owner: nn.Module, attribute: str) -> bool:
    """Whether it is one of the parameters that hooks of torch make a tensor of: `weight_g` of a `weight` (weight_norm),
    `weight_orig` (spectral_norm, pruning)."""
    for hook in owner._forward_pre_hooks.values():
        made = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
        if type(hook).__module__.startswith("torch.nn.utils.") and attribute.startswith(f"{made}_"):
            return True
    return False

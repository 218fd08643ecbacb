"""Parameters that join a model after `shard_model` are noticed at its next forward: nobody would reduce their grads.

One look per forward of the root at which objects its modules hold, and none per weight used.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from gtp.errors import GTPStateError
from gtp.ops._common import refused_transform
from gtp.runtime.bracket import WHY_GRAPHS_BREAK
from gtp.runtime.tracing import refuse_tracing
from gtp.weights.askers import refused_wrapper, transform_level
from gtp.weights.parameter import GTPWeight


def watch_parameters(root: nn.Module) -> None:
    """Makes every later forward of `root` check that its parameters are those of now. Fewer are fine.

    The forward raises `GTPStateError` where a parameter was added or replaced, `UnsupportedError` inside a transform of
    `torch.func`, inside DistributedDataParallel and while it is traced.
    """
    views = _views(root)
    known = _look(views)
    objects = list(chain.from_iterable(views))  # alive, so that no later object gets an address of theirs

    def check(module: nn.Module) -> None:  # the root; not from outside, where it would make a cycle
        nonlocal views, known, objects
        if transform_level() is not None:
            raise refused_transform(
                f"{type(module).__name__} is sharded, and was called inside a transform of torch.func (grad, vmap, ...)"
            )
        _refuse_wrapper()
        now = _look(views)
        if now != known:
            refuse_tracing(type(module).__name__)  # torch.export puts other parameters in place of the model's
            _require_known(module, {id(held) for held in objects})
            views = _views(module)
            known = _look(views)
            objects = list(chain.from_iterable(views))

    outside = torch.compiler.disable(check, reason=WHY_GRAPHS_BREAK)

    def before(module: nn.Module, args: Any) -> None:
        outside(module)

    root.register_forward_pre_hook(before)


def _refuse_wrapper() -> None:
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is not None:
        for name, parameter in wrapper.module.named_parameters():
            if isinstance(parameter, GTPWeight):
                raise refused_wrapper(name)


def _views(root: nn.Module) -> list[Any]:
    """What every module holds, live. These are parts of the modules, never the root, so its hook makes no cycle."""
    return [held.values() for module in root.modules() for held in (module._parameters, module._modules)]


def _look(views: list[Any]) -> list[int]:
    return list(map(id, chain.from_iterable(views)))


def _require_known(root: nn.Module, known: set[int]) -> None:
    for prefix, module in root.named_modules():
        if isinstance(module, ParametrizationList) and id(module) not in known:
            raise GTPStateError(
                f"{prefix.replace('.parametrizations.', '.')}: it was given a parametrization (weight_norm, ...) "
                "after gtp.shard_model, which would compute from this rank's shard. Parametrize the module before "
                "gtp.shard_model; the parameters behind it then stay replicated"
            )
        for attribute, held in module._parameters.items():
            if held is None or id(held) in known:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            how = (
                "it was added or replaced"
                if isinstance(held, nn.Parameter)
                else "a plain tensor stands in its place (as in torch.func.functional_call)"
            )
            raise GTPStateError(
                f"{name}: {how} after gtp.shard_model, which does not know it: ranks may hold different values of it, "
                "and nobody would reduce its gradient. Build the whole model (adapters, parametrizations such as "
                "weight_norm, new heads) before gtp.shard_model; to change values write into the parameter "
                "(load_state_dict, gtp.full_weights(model, write=True))"
            )

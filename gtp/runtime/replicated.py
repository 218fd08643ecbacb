"""`ReplicatedGradients`: biases, norms and other parameters that every rank holds whole.

Ranks see different data, so their gradients are reduced over the same axes as the shards'. Autograd accumulates into
`.grad` by itself; what is reduced must be this backward's contribution alone, or a sum over ranks would multiply what
earlier backwards left there. So the value in `.grad` is set aside while the new one arrives, and added back when all
are reduced, in one flat fp32 message per group.

Post-accumulate-grad hooks that users put on such a parameter run when its reduced gradient is in place, like those of
sharded weights, and not when autograd finishes its local part.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gtp.runtime.transport import Transport


@dataclasses.dataclass(eq=False, slots=True)
class _Replicated:
    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    process_groups: tuple[dist.ProcessGroup, ...]
    arrived: bool = False
    aside: torch.Tensor | None = None  # what `.grad` held before this backward
    held: torch.Tensor | None = None  # contributions that no_sync kept from being reduced
    user_hooks: dict[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class _Contribution:
    entry: _Replicated
    parameter: torch.nn.Parameter
    aside: torch.Tensor | None
    grad: torch.Tensor


class ReplicatedGradients:
    """Reduces the gradients of replicated parameters once per backward."""

    def __init__(self, transport: Transport, *, mean: bool, on_gradient: Callable[[], None]) -> None:
        self._transport = transport
        self._mean = mean
        self._on_gradient = on_gradient
        self._entries: list[_Replicated] = []
        self._frozen: list[_Replicated] = []  # autograd hooks want a parameter that requires grad
        self.accumulate_only = False

    def add(self, name: str, parameter: torch.nn.Parameter, process_groups: Sequence[dist.ProcessGroup]) -> None:
        """Registers a parameter whose gradient is reduced over each of `process_groups` in turn."""
        entry = _Replicated(name, weakref.ref(parameter), tuple(process_groups))
        self._entries.append(entry)
        self._frozen.append(entry)
        self.hook_trainable()

    def hook_trainable(self) -> None:
        """Hooks parameters that want a gradient by now: one frozen at the start may be thawed at any time."""
        if not self._frozen:
            return
        frozen = []
        for entry in self._frozen:
            parameter = entry.parameter()
            if parameter is not None and parameter.requires_grad:
                self._hook(entry, parameter)
            elif parameter is not None:
                frozen.append(entry)
        self._frozen = frozen

    def end_backward(self) -> list[torch.nn.Parameter]:
        """Reduces what arrived, puts it into `.grad`, and returns the parameters that received a gradient."""
        contributions = self._collect()
        if self.accumulate_only:
            for c in contributions:
                c.entry.held = c.grad.to(torch.promote_types(c.grad.dtype, torch.float32), copy=True)
            return []
        self._reduce(contributions)
        for c in contributions:
            c.parameter.grad = c.grad if c.aside is None else c.aside.add_(c.grad)
        return [c.parameter for c in contributions]

    def restore_hooks(self) -> None:
        """Puts the users' hooks back where they belong."""
        for entry in self._entries:
            if entry.user_hooks:
                parameter = entry.parameter()
                hooks = None if parameter is None else parameter._post_accumulate_grad_hooks
                if hooks is not None:
                    hooks.update(entry.user_hooks)
                entry.user_hooks = {}

    def run_hooks(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Runs the users' post-accumulate-grad hooks."""
        for parameter in parameters:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    def abandon(self) -> None:
        """After a backward that raised: `.grad` is what it was before."""
        for entry in self._entries:
            parameter = entry.parameter()
            if entry.arrived and parameter is not None:
                parameter.grad = entry.aside
            entry.arrived, entry.aside = False, None
        self.restore_hooks()

    def discard_held(self) -> None:
        """Drops gradients that `no_sync` accumulated and nobody reduced."""
        for entry in self._entries:
            entry.held = None

    def _hook(self, entry: _Replicated, parameter: torch.nn.Parameter) -> None:
        mine = weakref.ref(self)
        reference = entry.parameter

        def before_accumulation(grad: torch.Tensor) -> None:
            owner, target = mine(), reference()
            if owner is not None and target is not None:
                owner._set_aside(entry, target)

        parameter.register_hook(before_accumulation)

    def _set_aside(self, entry: _Replicated, parameter: torch.nn.Parameter) -> None:
        self._on_gradient()
        if not entry.arrived:
            entry.arrived = True
            entry.aside, parameter.grad = parameter.grad, None
            hooks = parameter._post_accumulate_grad_hooks
            if hooks:
                entry.user_hooks = dict(hooks)
                hooks.clear()

    def _collect(self) -> list[_Contribution]:
        """What this backward adds, with `.grad` as it was before it."""
        contributions: list[_Contribution] = []
        for entry in self._entries:
            parameter = entry.parameter()
            if parameter is None or not (entry.arrived or (entry.held is not None and not self.accumulate_only)):
                continue
            grad: torch.Tensor | None = None
            if entry.arrived:
                grad = None if parameter.grad is None else parameter.grad.detach()
                parameter.grad, entry.aside, entry.arrived = entry.aside, None, False
            if entry.held is not None:
                held, entry.held = entry.held, None
                grad = held if grad is None else held.add_(grad)
            if grad is not None:
                contributions.append(_Contribution(entry, parameter, parameter.grad, grad))
        return contributions

    def _reduce(self, contributions: list[_Contribution]) -> None:
        batches: dict[tuple[Any, ...], list[_Contribution]] = {}
        for c in contributions:
            wide = torch.promote_types(c.grad.dtype, torch.float32)
            batches.setdefault((c.entry.process_groups, wide, c.grad.device), []).append(c)
        started = []
        for (process_groups, wide, _), batch in batches.items():
            names = ", ".join(c.entry.name for c in batch)
            for process_group in process_groups:
                self._transport.agree(process_group, f"reduce the gradients of {names}")
            flat = torch.cat([c.grad.reshape(-1).to(wide) for c in batch])
            started.append((flat, batch, process_groups, self._transport.start_all_reduce(flat, process_groups)))
        for flat, batch, process_groups, ticket in started:
            self._transport.finish_all_reduce(ticket)
            if self._mean:
                flat /= math.prod(group.size() for group in process_groups)
            for c, reduced in zip(batch, flat.split([c.grad.numel() for c in batch]), strict=True):
                c.grad = reduced.view(c.grad.shape).to(c.parameter.dtype, copy=True)

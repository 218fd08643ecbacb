"""`ReplicatedGradients`: biases, norms and other parameters that every rank holds whole.

Ranks see different data, so their gradients are reduced over the same axes as the shards'. Autograd accumulates into
`.grad` by itself; what is reduced must be this backward's contribution alone, or a sum over ranks would multiply what
earlier backwards left there. So the value in `.grad` is set aside while the new one arrives, and added back when all
are reduced, in one flat fp32 message per group.

[Note: one message on every rank] A parameter may be used by some ranks only: a learned token for inputs that are left
out, a norm of one branch. Without a gradient a rank sends zeros, so that messages are alike; and a one for each
gradient that it has, so that who has none finds out whether others have. It asks the message for that, which waits for
the device, so a parameter that no rank uses is better frozen. While a graph is captured nobody can be asked: there,
what a rank has no gradient for gets none.

Hooks that users put on such a parameter are not for autograd to call, which has the local part only; each is wrapped
where it is registered (`_Deferred`). Those of `Tensor.register_hook` run when the gradient is reduced, see it before it
is accumulated, and may change it. Post-accumulate-grad hooks run when it is in place, like those of sharded weights.
So hooks change nothing in what ranks send to each other, and a rank may have some that others have not. A gradient that
`torch.autograd.grad` returns is reduced on the spot, in a message of its own.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from gtp.errors import GTPStateError, UnsupportedError
from gtp.ops.compilers import never_compiled
from gtp.runtime.backward import NO_TASK, backward_task
from gtp.runtime.capture import current_capture
from gtp.runtime.held import HeldGradient, plain_gradient
from gtp.runtime.reduction_order import ReductionOrder
from gtp.runtime.transport import Transport


@dataclasses.dataclass(eq=False, slots=True)
class _Replicated:
    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    process_groups: tuple[dist.ProcessGroup, ...]
    like: torch.Tensor  # on the meta device: what a message has room for, also when the parameter is gone
    device: torch.device
    trained: bool = False
    arrived: bool = False
    aside: torch.Tensor | None = None  # what `.grad` held before this backward
    held: HeldGradient | None = None  # contributions that no_sync kept from being reduced


@dataclasses.dataclass(eq=False, slots=True)
class _Contribution:
    """What one parameter adds to a message.

    Attributes:
        parameter: None if it was deleted, on this rank at least.
        aside: `.grad` without it.
        grad: The local gradient, then the reduced one. None: this rank has none; then, no rank has.
    """

    entry: _Replicated
    parameter: torch.nn.Parameter | None
    aside: torch.Tensor | None
    grad: torch.Tensor | None


class _Deferred:
    """A user's hook, in its place among the parameter's hooks. Autograd calls it too early."""

    __slots__ = ("_owner", "hook")

    def __init__(self, hook: Callable[..., Any], owner: weakref.ref[ReplicatedGradients]) -> None:
        self.hook = hook
        self._owner = owner

    def __call__(self, argument: torch.Tensor) -> Any:
        owner = self._owner()
        if owner is None or owner.returns_gradients:  # an ordinary parameter again; or this is the reduced gradient
            return self.hook(argument)
        return None


class _TensorHooks(OrderedDict[int, Any]):
    """`parameter._backward_hooks`: ours first, and users' deferred.

    Those of before are still removed from the dict in which they were registered, by their handles.
    """

    def __init__(self, ours: Callable[..., Any], owner: weakref.ref[ReplicatedGradients], earlier: Any) -> None:
        super().__init__()
        self.owner = owner
        self._earlier = earlier or {}
        super().__setitem__(RemovableHandle(self).id, ours)
        for number in self._earlier:
            self[number] = _while_registered(self._earlier, number)

    def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
        super().__setitem__(number, _Deferred(hook, self.owner))

    def of_users(self) -> list[Callable[..., Any]]:
        """What users registered and have not removed, in order."""
        return [hook.hook for hook in self.values() if isinstance(hook, _Deferred)]


def _while_registered(hooks: Any, number: int) -> Callable[..., Any]:
    def call(grad: torch.Tensor) -> Any:
        hook = hooks.get(number)
        return None if hook is None else hook(grad)

    return call


def refuse_other_owner(name: str, parameter: torch.nn.Parameter, owner: ReplicatedGradients | None = None) -> None:
    """One runtime reduces a parameter's gradient.

    Raises:
        GTPStateError: the parameter belongs to another sharded model that is alive.
    """
    hooks = parameter._backward_hooks
    other = hooks.owner() if isinstance(hooks, _TensorHooks) else None
    if other is not None and other is not owner:
        raise GTPStateError(
            f"{name} is a parameter of another sharded model, which reduces its gradient; two would reduce it twice. "
            "Shard a module that holds both models, once, or give each a parameter of its own"
        )


class ReplicatedGradients:
    """Reduces the gradients of replicated parameters once per backward."""

    def __init__(
        self, transport: Transport, *, mean: bool, order: ReductionOrder, on_gradient: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._order = order
        self._mean = mean
        self._on_gradient = on_gradient
        self._entries: list[_Replicated] = []
        self._frozen: list[_Replicated] = []  # autograd hooks want a parameter that requires grad
        self._task = NO_TASK
        self.returns_gradients = False  # the running backward is a `torch.autograd.grad`
        self.accumulate_only = False

    def add(self, name: str, parameter: torch.nn.Parameter, process_groups: Sequence[dist.ProcessGroup]) -> None:
        """Registers a parameter whose gradient is reduced over each of `process_groups` in turn."""
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        entry = _Replicated(
            name, weakref.ref(parameter), tuple(process_groups), like, parameter.device, parameter.requires_grad
        )
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
                if c.grad is not None and c.parameter is not None:
                    wide = c.grad.to(torch.promote_types(c.grad.dtype, torch.float32), copy=True)
                    c.entry.held = HeldGradient.beside(c.parameter, wide)
            return []
        self._reduce(contributions, ends=True)
        received = []
        for c in contributions:
            if c.grad is not None and c.parameter is not None:
                grad = self._after_tensor_hooks(c.parameter, c.grad)
                c.parameter.grad = grad if c.aside is None else plain_gradient(c.aside).add_(grad)
                received.append(c.parameter)
        return received

    def run_hooks(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Runs the users' post-accumulate-grad hooks."""
        for parameter in parameters:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                (hook.hook if isinstance(hook, _Deferred) else hook)(parameter)

    def abandon(self) -> None:
        """After a backward that raised: `.grad` is what it was before."""
        for entry in self._entries:
            parameter = entry.parameter()
            if entry.arrived and parameter is not None:
                parameter.grad = entry.aside
            entry.arrived, entry.aside = False, None

    def discard_held(self) -> None:
        """Drops gradients that `no_sync` accumulated and nobody reduced."""
        for entry in self._entries:
            entry.held = None

    def _hook(self, entry: _Replicated, parameter: torch.nn.Parameter) -> None:
        mine = weakref.ref(self)
        reference = entry.parameter

        @never_compiled
        def before_accumulation(grad: torch.Tensor | None) -> torch.Tensor | None:
            owner, target = mine(), reference()
            if grad is None or owner is None or target is None:  # a function may have no gradient for it
                return None
            return owner._on_arrival(entry, target, grad)

        refuse_other_owner(entry.name, parameter, self)
        parameter._backward_hooks = _TensorHooks(before_accumulation, mine, parameter._backward_hooks)

    def _after_tensor_hooks(self, parameter: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        hooks = parameter._backward_hooks
        if isinstance(hooks, _TensorHooks) and len(hooks) > 1:
            with torch.no_grad():
                for hook in hooks.of_users():
                    changed = hook(grad)
                    grad = grad if changed is None else changed
        return grad

    def _on_arrival(self, entry: _Replicated, parameter: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
        """A local gradient is about to be accumulated, or returned. The gradient to go on with; None: this one."""
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{entry.name}: its gradient is sparse ({grad.layout}), and gradients of a sharded model are reduced "
                "dense. Build the module with sparse=False"
            )
        task = backward_task()
        if task != self._task:  # asking takes long, and what a backward does with one leaf it does with all
            self._task, self.returns_gradients = task, is_returned(parameter)
        if self.returns_gradients:
            return self._returned(entry, parameter, grad)
        self._on_gradient()
        if not entry.arrived:
            entry.arrived = True
            entry.aside, parameter.grad = parameter.grad, None
            self._defer_hooks(parameter)
        return None

    def _returned(self, entry: _Replicated, parameter: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{entry.name}: torch.autograd.grad with create_graph=True by a parameter of a sharded model is not "
                "supported: its gradient is reduced over ranks, which has no second derivative. Call it without "
                "create_graph=True"
            )
        if current_capture(grad.device):
            return None  # a graphed layer's backward returns it to autograd, which comes here once more
        contribution = _Contribution(entry, parameter, None, grad)
        self._reduce([contribution], ends=False)
        return contribution.grad

    def _defer_hooks(self, parameter: torch.nn.Parameter) -> None:
        hooks = parameter._post_accumulate_grad_hooks
        for number, hook in (hooks or {}).items():
            if not isinstance(hook, _Deferred):
                hooks[number] = _Deferred(hook, weakref.ref(self))

    def _collect(self) -> list[_Contribution]:
        """What this backward adds, with `.grad` as it was before it: see [Note: one message on every rank]."""
        contributions: list[_Contribution] = []
        mine = any(entry.arrived or (entry.held is not None and not self.accumulate_only) for entry in self._entries)
        if not (mine or self._order.any):
            return []  # a backward for inputs alone, or one that returns its gradients
        for entry in self._entries:
            parameter = entry.parameter()
            if parameter is not None:
                entry.trained = parameter.requires_grad
            if not (entry.trained or entry.arrived or entry.held is not None):
                continue
            if parameter is None:  # when Python deletes it is each rank's own affair, and the message is not
                contributions.append(_Contribution(entry, None, None, None))
                continue
            grad: torch.Tensor | None = None
            if entry.arrived:
                grad = None if parameter.grad is None else parameter.grad.detach()
                parameter.grad, entry.aside, entry.arrived = entry.aside, None, False
            if entry.held is not None and (grad is not None or not self.accumulate_only):
                held, entry.held = entry.held.unless_zeroed(parameter), None
                if held is not None:
                    grad = held if grad is None else held.add_(grad)
            contributions.append(_Contribution(entry, parameter, parameter.grad, grad))
        return contributions

    def _reduce(self, contributions: list[_Contribution], *, ends: bool) -> None:
        """
        Args:
            ends: Whether all that this backward reduces has begun, and ranks are compared.
        """
        batches: dict[tuple[Any, ...], list[_Contribution]] = {}
        for c in contributions:
            wide = torch.promote_types(c.entry.like.dtype, torch.float32).to_real()
            batches.setdefault((c.entry.process_groups, wide, c.entry.device), []).append(c)
        started = []
        for (process_groups, wide, device), batch in batches.items():
            names = ", ".join(c.entry.name for c in batch)
            for process_group in process_groups:
                self._transport.agree(process_group, f"reduce the gradients of {names}")
            words = self._order.count(device, process_groups) if ends else 0
            message = _Message(batch, words, wide, device)
            message.fill()
            self._order.put_into(message.words, process_groups)
            started.append((message, process_groups, self._transport.start_all_reduce(message.flat, process_groups)))
        for _, _, ticket in started:
            self._transport.finish_all_reduce(ticket)
        for message, process_groups, _ in started:
            self._order.judge(message.words, process_groups)
            if self._mean:
                message.flat /= math.prod(group.size() for group in process_groups)
            message.take_out()


class _Message:
    """The gradients of a batch of parameters, one after the other, for each whether it is there, and what
    `ReductionOrder` adds.

    Attributes:
        flat: What is summed over ranks.
        words: Its part that is `ReductionOrder`'s.
    """

    def __init__(self, batch: list[_Contribution], words: int, dtype: torch.dtype, device: torch.device) -> None:
        self._batch = batch
        sizes = [c.entry.like.numel() * (2 if c.entry.like.is_complex() else 1) for c in batch]
        self._all_here = all(c.grad is not None for c in batch)
        make = torch.empty if self._all_here else torch.zeros
        self.flat = make(sum(sizes) + len(batch) + words, dtype=dtype, device=device)
        *self._parts, self._flags, self.words = self.flat.split([*sizes, len(batch), words])

    def fill(self) -> None:
        """Puts in what this rank has."""
        here = [(i, c.grad) for i, c in enumerate(self._batch) if c.grad is not None]
        with torch.no_grad():
            if self._all_here:
                self._flags.fill_(1.0)
            elif not current_capture(self.flat.device):  # in which nobody asks
                flags = [float(c.grad is not None) for c in self._batch]
                told = torch.tensor(flags, dtype=self.flat.dtype, pin_memory=self.flat.is_cuda)
                self._flags.copy_(told, non_blocking=True)
            _copy_all([self._parts[i] for i, _ in here], [_as_real(grad).reshape(-1) for _, grad in here])

    def take_out(self) -> None:
        """Gives each parameter that had a gradient on some rank the sum, in memory of its own."""
        known = self._all_here or current_capture(self.flat.device)
        flags = [c.grad is not None for c in self._batch] if known else (self._flags > 0).tolist()
        targets, sources = [], []
        for c, part, there in zip(self._batch, self._parts, flags, strict=True):
            c.grad = None
            if there and c.parameter is not None:
                c.grad = torch.empty(c.parameter.shape, dtype=c.parameter.dtype, device=c.parameter.device)
                targets.append(_as_real(c.grad).view(-1))
                sources.append(part)
        _copy_all(targets, sources)


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """One kernel for all on a GPU, where one each would end most backwards with a row of very small ones."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def _as_real(grad: torch.Tensor) -> torch.Tensor:
    """A complex gradient `[...]` as `[..., 2]`; a real one is itself."""
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def is_replicated(parameter: torch.Tensor) -> bool:
    """Whether a runtime reduces its gradient, into memory of its own."""
    return isinstance(parameter._backward_hooks, _TensorHooks)


def is_returned(parameter: torch.Tensor) -> bool:
    """Whether the running backward is a `torch.autograd.grad`, in which only parameters that it asks for arrive."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # torch's answer for a leaf that it was asked for
        return True
    return False

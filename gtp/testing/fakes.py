"""`FakeDistributedWeight`: a `DistributedWeight` in one process, for tests of code that runs GEMMs on such weights.

A fake records what it is asked, and answers so that a wrong route is a wrong number: full weights come multiplied by
one scale in forward and another in backward, gradients by a third. Memory with undefined contents is NaN. Reading an
attribute that is neither a tensor's nor the contract's raises. `violating_weight` makes fakes that break one rule each.

    weight = FakeDistributedWeight(torch.eye(4), rows=(0, 2))     # this "rank" holds rows 0 and 1
    y = gtp.ops.linear(x, weight)                                 # equals x @ (2 * eye).t()
    y.sum().backward()
    assert weight.methods == ["materialize_group_for_forward", "grad_buffer", "finalize_group_grads"]
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import torch

from gtp.errors import GTPValueError, ProtocolError

Mode = Literal["ready", "deferred", "main_grad"]


class Call(NamedTuple):
    """One call of a contract method.

    Attributes:
        method: Its name.
        options: Keyword arguments beyond the contract's, which callers may add (such as `nvtx_label`).
        buffers: For `finalize_group_grads`, per wgrad whether it is the tensor that `grad_buffer` handed out.
    """

    method: str
    options: dict[str, Any]
    buffers: tuple[bool, ...] = ()


@dataclasses.dataclass(eq=False, slots=True)
class _State:
    """What a fake knows of itself; not for the code under test."""

    full: torch.Tensor
    rows: slice
    mode: Mode
    scales: tuple[float, float, float]
    buffer_dtype: torch.dtype
    label: str
    leader: weakref.ref[FakeDistributedWeight] | None = None
    followers: list[FakeDistributedWeight] = dataclasses.field(default_factory=list)
    handed_out: list[weakref.ref[torch.Tensor]] = dataclasses.field(default_factory=list)
    buffer: weakref.ref[torch.Tensor] | None = None


class FakeDistributedWeight(torch.nn.Parameter):
    """A leaf that holds rows `start:stop` of `full` and keeps the contract of `gtp.protocol.DistributedWeight`.

    Args:
        full: `[rows, *]`, the full weight; a copy is kept.
        mode: What finalize answers. "ready": the shard's gradient, which autograd accumulates into `.grad`.
            "deferred": None, `.grad` is written by the fake. "main_grad": a placeholder of NaN,
            `grad_added_to_main_grad` is set and fp32 `main_grad` has been added to.
        rows: `(start, stop)`, the rows of the shard. Default: all.
        requires_grad: Whether the weight is trainable.
        scale_forward, scale_backward: Factors of the full weights handed out in forward and in backward.
        scale_finalize: Factor of gradients.
        buffer_dtype: Dtype of grad buffers. Default: the weight's.
        label: Name in error messages.

    Attributes:
        calls: What was asked, in order. Of a group, all calls are in the leader's list; only `grad_buffer` is asked of
            the others, and is in the leader's list too.
    """

    is_distributed_weight = True
    calls: list[Call]
    fake: _State
    main_grad: torch.Tensor
    grad_added_to_main_grad: bool

    def __new__(
        cls,
        full: torch.Tensor,
        *,
        mode: Mode = "ready",
        rows: tuple[int, int] | None = None,
        requires_grad: bool = True,
        scale_forward: float = 2,
        scale_backward: float = 3,
        scale_finalize: float = 5,
        buffer_dtype: torch.dtype | None = None,
        label: str = "fake",
    ) -> FakeDistributedWeight:
        if mode not in ("ready", "deferred", "main_grad"):
            raise GTPValueError(f"mode must be 'ready', 'deferred' or 'main_grad', got {mode!r}")
        start, stop = rows or (0, full.shape[0])
        if not 0 <= start <= stop <= full.shape[0]:
            raise GTPValueError(f"rows must be (start, stop) within 0 and {full.shape[0]}, in order; got {rows}")
        weight: FakeDistributedWeight = torch.Tensor._make_subclass(
            cls, full.detach()[start:stop].clone(), requires_grad
        )
        weight.fake = _State(
            full=full.detach().clone(),
            rows=slice(start, stop),
            mode=mode,
            scales=(scale_forward, scale_backward, scale_finalize),
            buffer_dtype=buffer_dtype or full.dtype,
            label=label,
        )
        weight.calls = []
        if mode == "main_grad":
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=full.device)
            weight.grad_added_to_main_grad = False
        return weight

    @classmethod
    def make_group(cls, fulls: Sequence[torch.Tensor], **options: Any) -> list[FakeDistributedWeight]:
        """Fakes that are one weight group, leader first. `options` as for one fake, the same for all."""
        label = options.pop("label", "fake")
        weights = [cls(full, label=f"{label}{i}", **options) for i, full in enumerate(fulls)]
        for weight in weights[1:]:
            weight.fake.leader = weakref.ref(weights[0])
        weights[0].fake.followers = weights[1:]
        return weights

    @property
    def name(self) -> str:
        """What error messages call this weight."""
        return self.fake.label

    @property
    def methods(self) -> list[str]:
        """The names of the contract methods that were called, in order."""
        return [call.method for call in self.calls]

    @property
    def live_full_weights(self) -> int:
        """How many of the full weights handed out are still referenced by somebody."""
        return sum(ref() is not None for ref in self.fake.handed_out)

    # -- the contract ------------------------------------------------------------------------------------------

    def materialize_group_for_forward(self, **options: Any) -> torch.Tensor | list[torch.Tensor]:
        self._record("materialize_group_for_forward", options)
        return _bare(self._full_weights(0))

    def materialize_group_for_backward(self, **options: Any) -> torch.Tensor | list[torch.Tensor]:
        self._record("materialize_group_for_backward", options)
        return _bare(self._full_weights(1))

    def grad_buffer(self, **options: Any) -> torch.Tensor:
        leader = self.fake.leader() if self.fake.leader is not None else self
        assert leader is not None, "the leader of a group was dropped before its followers"
        leader.calls.append(Call("grad_buffer", options))
        buffer = torch.full_like(self.fake.full, float("nan"), dtype=self.fake.buffer_dtype)
        self.fake.buffer = weakref.ref(buffer)
        return buffer

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor], **options: Any
    ) -> torch.Tensor | list[torch.Tensor | None] | None:
        members = self._members()
        given = [wgrads] if isinstance(wgrads, torch.Tensor) else list(wgrads)
        if len(given) != len(members) or isinstance(wgrads, torch.Tensor) != (len(members) == 1):
            raise ProtocolError(f"{self.fake.label}: finalize takes a bare wgrad for one weight, a list for several")
        for member, wgrad in zip(members, given, strict=True):
            if wgrad.shape != member.fake.full.shape:
                raise ProtocolError(
                    f"{member.fake.label}: finalize takes a wgrad {tuple(member.fake.full.shape)}, "
                    f"got {tuple(wgrad.shape)}"
                )
        buffers = tuple(
            m.fake.buffer is not None and m.fake.buffer() is wgrad for m, wgrad in zip(members, given, strict=True)
        )
        self._record("finalize_group_grads", options, buffers)
        return _bare([m._deliver(wgrad) for m, wgrad in zip(members, given, strict=True)])

    # -- inside ------------------------------------------------------------------------------------------------

    def _members(self) -> list[FakeDistributedWeight]:
        return [self, *self.fake.followers]

    def _record(self, method: str, options: dict[str, Any], buffers: tuple[bool, ...] = ()) -> None:
        if self.fake.leader is not None:
            raise ProtocolError(f"{self.fake.label}: {method} was asked of a weight that does not lead its group")
        self.calls.append(Call(method, options, buffers))

    def _full_weights(self, phase: int) -> list[torch.Tensor]:
        answer = []
        for member in self._members():
            full = member.fake.full * member.fake.scales[phase]
            member.fake.handed_out.append(weakref.ref(full))
            answer.append(full)
        return answer

    def _deliver(self, wgrad: torch.Tensor) -> torch.Tensor | None:
        fake = self.fake
        grad = wgrad[fake.rows].detach() * fake.scales[2]
        if fake.mode == "ready":
            return grad
        if fake.mode == "deferred":
            grad = grad.to(self.dtype)
            self.grad = grad if self.grad is None else self.grad + grad
            return None
        self.main_grad += grad
        self.grad_added_to_main_grad = True
        return torch.full_like(grad, float("nan"))

    def __getattr__(self, name: str) -> Any:
        """Reached for what neither a tensor nor the fake has."""
        if name.startswith("_") or name == "grad_added_to_main_grad":
            # torch's own helpers ask tensors for such names; the flag is the contract's, and may be absent
            raise AttributeError(name)
        raise ProtocolError(
            f"{self.fake.label}: {name!r} was read on a distributed weight; it is not in the contract of "
            "gtp.protocol.DistributedWeight, and other implementers do not have it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeDistributedWeight:
        raise ProtocolError(f"{self.fake.label}: a distributed weight belongs to a group of ranks and is not copied")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        fake = self.fake
        rows = f"rows {fake.rows.start}:{fake.rows.stop} of {tuple(fake.full.shape)}"
        return f"{type(self).__name__}({fake.label!r}, {rows}, {fake.mode})"


class Violation(NamedTuple):
    """A rule of the contract, broken.

    Attributes:
        method: The contract method that answers wrongly.
        kind: "count": two answers for one weight. "type": no tensor. "shape": a column is missing. "rows": a row is
            missing. "strides": not contiguous. "distributed": a full weight that is a distributed weight itself.
    """

    method: str
    kind: str


VIOLATIONS: Final = (
    *(
        Violation(f"materialize_group_for_{phase}", kind)
        for phase in ("forward", "backward")
        for kind in ("count", "type", "shape", "strides", "distributed")
    ),
    Violation("materialize_group_for_backward", "rows"),
    *(Violation("grad_buffer", kind) for kind in ("type", "shape", "rows", "strides")),
    *(Violation("finalize_group_grads", kind) for kind in ("count", "type", "shape", "rows")),
)


def violating_weight(full: torch.Tensor, violation: Violation, **options: Any) -> FakeDistributedWeight:
    """A fake over `full` `[rows, in]` that keeps the contract but for one rule of `VIOLATIONS`. `options`: a fake's."""
    if violation not in VIOLATIONS:
        raise GTPValueError(f"violation must be one of gtp.testing.fakes.VIOLATIONS, got {violation}")
    weight = _ViolatingWeight(full, **options)
    weight.violation = violation
    return weight


class _ViolatingWeight(FakeDistributedWeight):
    violation: Violation

    def materialize_group_for_forward(self, **options: Any) -> Any:
        return self._answer("materialize_group_for_forward", super().materialize_group_for_forward(**options))

    def materialize_group_for_backward(self, **options: Any) -> Any:
        return self._answer("materialize_group_for_backward", super().materialize_group_for_backward(**options))

    def grad_buffer(self, **options: Any) -> Any:
        return self._answer("grad_buffer", super().grad_buffer(**options))

    def finalize_group_grads(self, wgrads: torch.Tensor | Sequence[torch.Tensor], **options: Any) -> Any:
        return self._answer("finalize_group_grads", super().finalize_group_grads(wgrads, **options))

    def _answer(self, method: str, right: Any) -> Any:
        kind = self.violation.kind
        if method != self.violation.method:
            return right
        if kind == "count":
            return [right, right]
        if kind == "type":
            return "not a tensor"
        if kind == "shape":
            return right[:, :-1].contiguous()
        if kind == "rows":
            return right[:-1]
        if kind == "strides":
            return right.t().contiguous().t()
        assert kind == "distributed", kind
        return FakeDistributedWeight(right)


def _bare[T](answers: list[T]) -> T | list[T]:
    """The contract's form: a bare answer for a group of one, a list for several."""
    return answers[0] if len(answers) == 1 else answers

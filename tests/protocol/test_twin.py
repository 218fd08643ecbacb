"""Our protocol and Transformer Engine's are structurally the same: what satisfies one satisfies the other.

Transformer Engine is not installed here. `Twin` is its protocol as the release 2.20.2 declares it (member names and
arity). A new release that changes it must change this list.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import pytest
import torch

from gtp.protocol import DistributedWeight
from gtp.testing.fakes import FakeDistributedWeight

# method: names of its arguments, without self
METHODS = {
    "materialize_group_for_forward": [],
    "materialize_group_for_backward": [],
    "finalize_group_grads": ["wgrads"],
    "grad_buffer": [],
}
FLAG = "is_distributed_weight"


@runtime_checkable
class Twin(Protocol):
    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Any: ...
    def materialize_group_for_backward(self) -> Any: ...
    def finalize_group_grads(self, wgrads: Any) -> Any: ...
    def grad_buffer(self) -> Any: ...


class OnlyTheTwins(torch.Tensor):
    """Written by somebody who knows Transformer Engine and not gtp."""

    is_distributed_weight = True

    def materialize_group_for_forward(self) -> Any: ...
    def materialize_group_for_backward(self) -> Any: ...
    def finalize_group_grads(self, wgrads: Any) -> Any: ...
    def grad_buffer(self) -> Any: ...


def members(protocol: type) -> set[str]:
    return set(protocol.__protocol_attrs__)  # type: ignore[attr-defined]


def test_members_are_the_same() -> None:
    assert members(DistributedWeight) == members(Twin) == {*METHODS, FLAG}


@pytest.mark.parametrize("method", METHODS)
def test_arguments_are_the_same(method: str) -> None:
    for protocol in (DistributedWeight, Twin):
        names = list(inspect.signature(getattr(protocol, method)).parameters)
        assert names == ["self", *METHODS[method]]


def test_a_class_written_for_the_twin_satisfies_ours() -> None:
    assert isinstance(torch.ones(2).as_subclass(OnlyTheTwins), DistributedWeight)


def test_our_fake_satisfies_the_twin() -> None:
    assert isinstance(FakeDistributedWeight(torch.ones(2, 2)), Twin)


@pytest.mark.parametrize("missing", [*METHODS, FLAG])
def test_a_class_that_lacks_a_member_satisfies_neither(missing: str) -> None:
    body = {name: getattr(OnlyTheTwins, name) for name in [*METHODS, FLAG] if name != missing}
    weight = torch.ones(2).as_subclass(type("Lacking", (torch.Tensor,), body))
    assert not isinstance(weight, DistributedWeight)
    assert not isinstance(weight, Twin)


@pytest.mark.parametrize("plain", [torch.ones(2), torch.nn.Parameter(torch.ones(2))])
def test_a_plain_tensor_satisfies_neither(plain: torch.Tensor) -> None:
    assert not isinstance(plain, DistributedWeight)
    assert not isinstance(plain, Twin)


def test_the_protocol_imports_torch_and_typing_extensions_only() -> None:
    import gtp.protocol.contract
    import gtp.protocol.dispatch

    for module in (gtp.protocol.contract, gtp.protocol.dispatch):
        imported = {value.__name__.split(".")[0] for value in vars(module).values() if inspect.ismodule(value)}
        assert imported <= {"enum", "torch"}

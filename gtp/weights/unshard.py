"""Weights that are whole while their module's forward runs, for modules that use them by functions other than
`F.linear` and `F.embedding`: convolutions, experts in one tensor, `addmm`, a kernel of somebody else's.

During the forward the module's attribute is the gathered weight (`gtp.ops.WholeWeights`), so its code is what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gtp.errors import GTPValueError
from gtp.ops import WholeWeights
from gtp.ops.compilers import outside_graphs
from gtp.ops.whole import refused_write
from gtp.weights.forwards import wrap_forward
from gtp.weights.parameter import GTPWeight

_Place = tuple[nn.Module, str]


class Reader(NamedTuple):
    """A module, and the places of the parameters that its forward reads."""

    module: nn.Module
    places: list[_Place]


def is_holder(module: nn.Module) -> bool:
    """Whether it holds parameters for the module around it, whose forward reads them: it has no forward, as lists, or
    one that is never called, as the output projection of `nn.MultiheadAttention`."""
    without = "forward" not in vars(module) and type(module).forward is nn.Module.forward
    return without or isinstance(module, NonDynamicallyQuantizableLinear)


def readers_of(root: nn.Module, places: Sequence[_Place]) -> list[Reader]:
    """The modules whose forwards read the parameters at `places` (module, attribute).

    Raises:
        GTPValueError: no forward within `root` is known to read one.
    """
    wanted = {(id(module), attribute) for module, attribute in places}
    readers: dict[int, Reader] = {}
    for reader, module, attribute in _read(root, None, set()):
        if (id(module), attribute) in wanted:
            if reader is None:
                raise GTPValueError(
                    f"{attribute} of {type(module).__name__} cannot be gathered for a forward: it is held by a "
                    f"{type(root).__name__}, which has none. Shard the model around it, or leave it replicated with "
                    "gtp.shard_model(exclude=...)"
                )
            readers.setdefault(id(reader), Reader(reader, [])).places.append((module, attribute))
    return list(readers.values())


def unshard_in_forward(readers: Sequence[Reader]) -> None:
    """Makes their forwards run with full weights, which are sharded by now."""
    for reader, places in readers:
        wrap_forward(reader, _with_whole_weights(places))


def _read(
    module: nn.Module, reader: nn.Module | None, seen: set[tuple[int, int]]
) -> Iterator[tuple[nn.Module | None, nn.Module, str]]:
    """Every parameter's place below `module`, with the module whose forward reads it."""
    if not is_holder(module):
        reader = module
    if (id(module), id(reader)) in seen:
        return
    seen.add((id(module), id(reader)))
    for attribute in module._parameters.keys():  # noqa: SIM118  # a scripted module has no iterator of them
        yield reader, module, attribute
    for child in module.children():
        yield from _read(child, reader, seen)


def _with_whole_weights(places: Sequence[_Place]) -> Callable[..., Any]:
    """What runs in place of a reader's forward. It holds modules weakly: they hold it."""
    held = [(weakref.ref(module), attribute) for module, attribute in places]

    @outside_graphs
    def run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _shown([(holder, attribute) for reference, attribute in held if (holder := reference()) is not None]):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _shown(places: Sequence[_Place]) -> Iterator[None]:
    """Inside, attributes of modules are the full weights: what an instance has goes before `nn.Module.__getattr__`.

    Places whose parameter was taken away since are passed over.
    """
    held: list[tuple[nn.Module, str, Any]] = [(m, name, m._parameters.get(name)) for m, name in places]
    found = [(vars(m), name, weight) for m, name, weight in held if weight is not None]
    distinct = list({id(weight): weight for _, _, weight in found}.values())
    before = [attributes.get(name) for attributes, name, _ in found]
    with WholeWeights(distinct) as full:
        of = {id(weight): _as_parameter(weight, tensor) for weight, tensor in zip(distinct, full, strict=True)}
        checked = [pair for pair in zip(distinct, full, strict=True) if pair[0].runtime.config.debug]
        del full
        try:
            for attributes, name, weight in found:
                attributes[name] = of[id(weight)]
            del of
            yield
            for weight, tensor in checked:
                _require_unwritten(weight, tensor)
        finally:
            checked.clear()
            for (attributes, name, _), earlier in zip(found, before, strict=True):
                _put(attributes, name, earlier)


def _as_parameter(weight: GTPWeight, full: torch.Tensor) -> torch.Tensor:
    """The full weight, with what users wrote on the parameter."""
    vars(full).update(weight.attributes_of_users())
    return full


def _put(attributes: dict[str, Any], name: str, earlier: torch.Tensor | None) -> None:
    """Back to what it was: nothing, or in a forward within the same module's forward, that one's full weight."""
    if earlier is None:
        attributes.pop(name, None)
    else:
        attributes[name] = earlier


def _require_unwritten(weight: GTPWeight, full: torch.Tensor) -> None:
    """Finds what `WholeWeights` cannot: `.data` writes without a trace, and this waits for the device.

    Raises:
        GTPStateError: this rank's rows are no longer what was gathered.
    """
    mine = weight.plain_shard()[weight.layout.valid_slice].to(full.dtype).contiguous()
    theirs = full.detach()[weight.layout.shard_slice]
    if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):  # a NaN is itself
        raise refused_write([weight])

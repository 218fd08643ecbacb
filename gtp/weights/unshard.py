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
from gtp.ops._common import outside_graphs
from gtp.weights.forwards import wrap_forward

# Modules that hold parameters for the one around them, whose forward reads them: their own is never called.
HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict, NonDynamicallyQuantizableLinear)

_Place = tuple[nn.Module, str]


class Reader(NamedTuple):
    """A module, and the places of the parameters that its forward reads."""

    module: nn.Module
    places: list[_Place]


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
                    f"{type(root).__name__}, which has none. Shard the model around it"
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
    if not isinstance(module, HOLDERS):
        reader = module
    if (id(module), id(reader)) in seen:
        return
    seen.add((id(module), id(reader)))
    for attribute in module._parameters:
        yield reader, module, attribute
    for child in module.children():
        yield from _read(child, reader, seen)


def _with_whole_weights(places: Sequence[_Place]) -> Callable[..., Any]:
    """What runs in place of a reader's forward. It holds modules weakly: they hold it."""
    held = [(weakref.ref(module), attribute) for module, attribute in places]

    @outside_graphs
    def run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _shown([(holder(), attribute) for holder, attribute in held]):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _shown(places: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Inside, attributes of modules are the full weights: what an instance has goes before `nn.Module.__getattr__`."""
    weights = [module._parameters[attribute] for module, attribute in places]
    distinct = list({id(weight): weight for weight in weights}.values())
    before = [vars(module).get(attribute) for module, attribute in places]
    with WholeWeights(distinct) as full:
        of = {id(weight): tensor for weight, tensor in zip(distinct, full, strict=True)}
        del full
        try:
            for (module, attribute), weight in zip(places, weights, strict=True):
                vars(module)[attribute] = of[id(weight)]
            del of
            yield
        finally:
            for (module, attribute), earlier in zip(places, before, strict=True):
                _put(module, attribute, earlier)


def _put(module: nn.Module, attribute: str, earlier: torch.Tensor | None) -> None:
    """Back to what it was: nothing, or in a forward within the same module's forward, that one's full weight."""
    if earlier is None:
        vars(module).pop(attribute, None)
    else:
        vars(module)[attribute] = earlier

"""Which parameters of a model are sharded, over which axes, in which groups. No collective, no tensor is touched."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gtp.errors import GTPValueError
from gtp.weights.axes import Axes, GroupOrMesh
from gtp.weights.contents import Site, buffers_of, sites_of, tensors_in_attributes, unregistered_in
from gtp.weights.refusals import (
    Held,
    refuse_models,
    refuse_parameters,
    refuse_shared_memory,
    refuse_tensor_class,
    refuse_to_shard,
)
from gtp.weights.served import NOT_SERVED, gathers_itself, is_served, obstacle_of, weight_groups_of


@dataclasses.dataclass
class Choice:
    """What happens to one parameter object.

    Attributes:
        names: Its fully qualified names; several where it is tied. The first is the one used in messages.
        owner: A module that holds it, the one that decided, and `attribute`, the name there.
        sharded: Whether its rows are split.
        reason: Why, for `GTPRuntime.report`.
        axes: Its groups.
        read_whole: The places, module and attribute, whose code needs the full weight during a forward.
    """

    names: list[str]
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter
    sharded: bool
    reason: str
    axes: Axes
    read_whole: list[tuple[nn.Module, str]] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


@dataclasses.dataclass(frozen=True)
class BufferChoice:
    """A buffer, which every rank holds whole, by its first name."""

    name: str
    owner: nn.Module
    attribute: str
    axes: Axes

    @property
    def value(self) -> torch.Tensor:
        value = self.owner._buffers[self.attribute]
        assert value is not None
        return value


@dataclasses.dataclass
class Selection:
    """Choices in order of registration, and the sharded ones in the groups that are gathered together.

    Attributes:
        buffers: Each dense buffer object once.
        unregistered: Parameters that modules keep in lists and the like, where torch does not see them, by name.
    """

    choices: list[Choice]
    groups: list[list[Choice]]
    buffers: list[BufferChoice]
    unregistered: dict[str, nn.Parameter]


def select(
    model: nn.Module,
    axes: GroupOrMesh | Mapping[str, GroupOrMesh],
    *,
    include: Sequence[str] | str | None,
    exclude: Sequence[str] | str | None,
    unshard: Sequence[str] | str | None,
    min_numel: int,
) -> Selection:
    """Decides for every parameter of `model`.

    Raises:
        GTPValueError: a pattern matches nothing, nothing is left to shard, or a chosen parameter cannot be sharded.
        GTPStateError: the model was sharded or wrapped already.
    """
    refuse_models(model)
    sites = sites_of(model)
    refuse_parameters((site.names[0], site.parameter) for site in sites)
    names = [name for site in sites for name in site.names]
    asked = _Asked(
        _patterns(include, "include", names),
        _patterns(exclude, "exclude", names) or [],
        _patterns(unshard, "unshard", names) or [],
        min_numel,
    )
    axes_of = _axes_lookup(axes, names)
    choices = [_choose(site, asked, axes_of(site.names)) for site in sites]
    if not any(choice.sharded for choice in choices):
        tried = "\n  ".join(f"{c.name}: {c.reason}" for c in choices) or "(the model has no parameters)"
        raise GTPValueError(
            "gtp.shard_model found nothing to shard. By default it takes the weights of nn.Linear and "
            "nn.Embedding modules; "
            f"name others with include= or unshard=. Parameters and why not:\n  {tried}"
        )
    buffers = [
        BufferChoice(names[0], module, attribute, axes_of(names)) for names, module, attribute in buffers_of(model)
    ]
    for buffer in buffers:
        refuse_tensor_class(buffer.name, buffer.value)
    for choice in choices:
        if choice.sharded:
            refuse_to_shard(choice.name, choice.parameter)
    known = {id(choice.parameter) for choice in choices}
    refuse_shared_memory(
        [Held(c.name, c.parameter, c.sharded) for c in choices]
        + [Held(b.name, b.value, False) for b in buffers]
        + [Held(name, tensor, False) for name, tensor in tensors_in_attributes(model, known)]
    )
    unregistered = unregistered_in(model, known)
    return Selection(choices, _grouped(model, choices), buffers, unregistered)


def _patterns(patterns: Sequence[str] | str | None, argument: str, names: list[str]) -> list[str] | None:
    if patterns is None:
        return None
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise GTPValueError(f"{argument} takes name patterns (strings), got {pattern!r}")
        _require_match(pattern, argument, names)
    return listed


def _require_match(pattern: str, argument: str, names: list[str]) -> None:
    if any(fnmatch.fnmatchcase(name, pattern) for name in names):
        return
    bare = pattern.replace("*", "")
    near = difflib.get_close_matches(bare, names, n=3, cutoff=0.3) or names[:3]
    raise GTPValueError(
        f"{argument} pattern {pattern!r} matches no parameter. Near names: {', '.join(near)}. Patterns are matched "
        "against the whole name ('*' crosses dots); list all with [n for n, _ in model.named_parameters()]"
    )


def _axes_lookup(axes: GroupOrMesh | Mapping[str, GroupOrMesh], names: list[str]) -> _AxesLookup:
    if not isinstance(axes, Mapping):
        return _AxesLookup([("*", Axes.of(axes))])
    if not axes:
        raise GTPValueError("the mapping from name pattern to group is empty: give at least {'*': group}")
    for pattern in axes:
        if not isinstance(pattern, str):
            raise GTPValueError(f"the mapping from name pattern to group has a key that is no string: {pattern!r}")
        if pattern != "*":
            _require_match(pattern, "group mapping", names)
    return _AxesLookup([(pattern, Axes.of(value)) for pattern, value in axes.items()])


class _AxesLookup:
    """First pattern that matches wins. Each parameter needs one: its gradient is reduced over these axes."""

    def __init__(self, entries: list[tuple[str, Axes]]) -> None:
        self._entries = entries

    def __call__(self, names: list[str]) -> Axes:
        for pattern, axes in self._entries:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return axes
        patterns = ", ".join(repr(p) for p, _ in self._entries)
        raise GTPValueError(
            f"{names[0]} matches none of the group mapping's patterns ({patterns}). Every parameter's gradient is "
            "reduced over some group; add a last entry '*' with the group of all data-parallel ranks"
        )


class _Asked(NamedTuple):
    """What the caller named: patterns, `include` None if not given."""

    include: list[str] | None
    exclude: list[str]
    unshard: list[str]
    min_numel: int


def _choose(site: Site, asked: _Asked, axes: Axes) -> Choice:
    """All places that hold the parameter decide: one that cannot work with a shard keeps it whole, else one that wants
    it sharded is enough."""
    names, parameter = site.names, site.parameter

    def choice(sharded: bool, reason: str, place: tuple[nn.Module, str] = site.places[0]) -> Choice:
        read_whole = [p for p in site.places if not gathers_itself(*p)] if sharded and unshard else []
        return Choice(names, *place, parameter, sharded, reason, axes, read_whole)

    unshard = _matches(names, asked.unshard)
    include = asked.include is not None and _matches(names, asked.include)
    if _matches(names, asked.exclude):
        return choice(False, "excluded by name")
    if asked.include is not None and not include and not unshard:
        return choice(False, "not named by include")
    by_exact_name = any(name in (*(asked.include or ()), *asked.unshard) for name in names)
    for owner, attribute in site.places:
        obstacle = obstacle_of(owner, attribute, unshard)
        if obstacle and by_exact_name:
            named = "unshard" if unshard else "include"
            raise GTPValueError(f"{names[0]} cannot be sharded: {obstacle}; leave it out of {named}")
        if obstacle:
            return choice(False, obstacle)
    if include or unshard:
        if not by_exact_name and not unshard and parameter.dim() != 2:
            return choice(False, f"{parameter.dim()}-d; a pattern takes matrices, others by their exact name")
        if by_exact_name or include:
            _require_shardable(names[0], parameter)
        place = site.places[0]
        reason = "named by unshard" if unshard else "named by include"
    else:
        served = [place for place in site.places if is_served(*place)]
        if not served:
            owner, attribute = site.places[0]
            return choice(False, f"{attribute} of {type(owner).__name__} {NOT_SERVED}")
        place = served[0]
        reason = f"weight of {type(place[0]).__name__}"
    if not parameter.is_floating_point():
        return choice(False, f"{parameter.dtype} is not a floating point dtype")
    if parameter.dim() < 1 or parameter.numel() == 0:
        return choice(False, f"shape {tuple(parameter.shape)} has no rows to split")
    if parameter.numel() < asked.min_numel:
        return choice(False, f"{parameter.numel()} elements, below min_numel={asked.min_numel}")
    return choice(True, reason, place)


def _matches(names: list[str], patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _require_shardable(name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_floating_point():
        raise GTPValueError(
            f"{name}: only floating point weights can be sharded, got {parameter.dtype}; leave it out of include"
        )
    if parameter.dim() < 1 or parameter.numel() == 0:
        raise GTPValueError(
            f"{name}: a weight is sharded along its rows (dim 0), and shape {tuple(parameter.shape)} has none; "
            "leave it out of include, it stays replicated"
        )


def _grouped(model: nn.Module, choices: list[Choice]) -> list[list[Choice]]:
    """Sharded choices, in the groups that modules declare; every other weight is a group of its own."""
    by_parameter = {id(choice.parameter): choice for choice in choices if choice.sharded}
    groups: list[list[Choice]] = []
    placed: set[int] = set()
    for group in _declared(model):
        members = [by_parameter[id(p)] for p in group if id(p) in by_parameter]
        if len(members) not in (0, len(group)) or len({(m.axes, m.parameter.dtype) for m in members}) > 1:
            raise GTPValueError(
                f"{members[0].name}: its module uses {len(group)} weights as one group, and they must be sharded "
                "together, over the same axes, in one dtype; make include, exclude and the group mapping treat them "
                "alike"
            )
        _require_no_reader(members)
        if _is_new(members, groups):
            groups.append(members)
            placed.update(id(m.parameter) for m in members)
    leaders = {id(members[0].parameter): members for members in groups}
    ordered: list[list[Choice]] = []
    for choice in choices:
        if id(choice.parameter) in leaders:
            ordered.append(leaders[id(choice.parameter)])
        elif choice.sharded and id(choice.parameter) not in placed:
            ordered.append([choice])
    return ordered


def _require_no_reader(members: list[Choice]) -> None:
    """
    Raises:
        GTPValueError: one of several weights that are gathered together is tied to one that is gathered alone.
    """
    for member in members if len(members) > 1 else []:
        if member.read_whole:
            others = ", ".join(m.name for m in members if m is not member)
            raise GTPValueError(
                f"{' = '.join(member.names)}: it is gathered together with {others}, and cannot be gathered alone for "
                f"the forward of a {type(member.read_whole[0][0]).__name__}, too. Untie it, or leave all of the group "
                "unsharded with gtp.shard_model(exclude=...)"
            )


def _is_new(members: list[Choice], groups: list[list[Choice]]) -> bool:
    """Whether a module's weights are a group that no other module has.

    Raises:
        GTPValueError: a weight is in two groups, or twice in one: the leader answers for one group, and the other would
            be given the wrong weights.
    """
    ids = [id(m.parameter) for m in members]
    for position, member in enumerate(members):
        if ids.index(ids[position]) < position:
            raise _in_two_groups(member, "twice in one group of weights that are gathered together")
    for group in groups:
        theirs = [id(m.parameter) for m in group]
        if ids != theirs and (shared := set(ids).intersection(theirs)):
            member = next(m for m in members if id(m.parameter) in shared)
            names = [", ".join(m.name for m in g) for g in (group, members)]
            raise _in_two_groups(member, f"gathered together with two groups of weights ({names[0]}; and {names[1]})")
    return bool(members) and all(ids != [id(m.parameter) for m in group] for group in groups)


def _in_two_groups(member: Choice, what: str) -> GTPValueError:
    return GTPValueError(
        f"{' = '.join(member.names)}: this tied weight is {what}. Tie whole groups, weight by weight and in one order, "
        "or leave it unsharded with gtp.shard_model(exclude=...), all of the group"
    )


def _declared(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    for module in model.modules():
        for names in weight_groups_of(module):
            parameters = [module._parameters.get(name) for name in names]
            if all(p is not None for p in parameters):
                yield [p for p in parameters if p is not None]

"""`shard_model`: swaps the weights of a model for `GTPWeight`s."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from gtp.config import GTPConfig
from gtp.errors import GTPStateError, GTPValueError
from gtp.runtime.group import Member, ShardOwner, WeightGroup
from gtp.runtime.runtime import GTPRuntime
from gtp.runtime.select import choose_transport
from gtp.runtime.transport import Transport
from gtp.weights.agreement import require_agreement
from gtp.weights.axes import Axes, GroupOrMesh, broadcast_first, broadcast_first_bytes
from gtp.weights.cut import take_shard as take_shard
from gtp.weights.foreign_inputs import refuse_foreign_inputs
from gtp.weights.layout import ShardLayout
from gtp.weights.meta import materialize_meta
from gtp.weights.parameter import GTPWeight, WeightHandle
from gtp.weights.report import ParameterReport
from gtp.weights.scripting import refuse_scripting
from gtp.weights.selection import Choice, Selection, select
from gtp.weights.state_dict import hook_state_dict
from gtp.weights.unshard import readers_of, unshard_in_forward
from gtp.weights.watch import watch_parameters

_log = logging.getLogger("gtp")

_WORTH_A_WORD = 0.1
"""Share of a model that may stay whole without a warning: norms and biases are far less."""


@torch.inference_mode(False)  # shards made in it could never be trained, and no write to them be noticed
def shard_model(
    model: nn.Module,
    group_or_mesh: GroupOrMesh | Mapping[str, GroupOrMesh],
    *,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    unshard: Sequence[str] | str | None = None,
    config: GTPConfig | None = None,
    init: Callable[[str, torch.Tensor], None] | None = None,
    device: torch.device | str | None = None,
    transport: Transport | None = None,
) -> GTPRuntime:
    """Shards the weights of `model` in place, and makes the runtime that gathers them just in time. Collective.

    Afterwards the model is used as before: forward, backward, optimizer. Ranks of a group feed it different data. Rank
    0's values win: parameters and buffers are broadcast, so ranks that were seeded differently end with one model.
    Buffers that ranks then change by themselves (running statistics) are not synchronized again.

    The model is complete with this call: a parameter that is added or replaced later makes its next forward raise.

    Args:
        model: Any module on one device, or on the meta device. Its parameters stay the same objects (except from the
            meta device), so an optimizer without state and tied weights keep working.
        group_or_mesh: Over which ranks: a process group, a 1-d mesh, or a 2-d mesh (replicate, gtp) on which shards are
            held alike along the first axis. Or a mapping from name pattern to one of these; the first match wins.
        include: Fully qualified name patterns (`*` crosses dots) of what to shard: matrices, and by its exact name
            anything that has rows. What torch's own modules use otherwise than through `F.linear` or `F.embedding`
            stays replicated. Default: the weights of Linear and Embedding modules. Everything else stays replicated,
            and its gradients are reduced over the same axes.
        exclude: Name patterns of what to leave replicated.
        unshard: Name patterns of what else to shard, of any shape, and to gather for as long as its module's forward
            runs, because that uses it by other functions than `F.linear` and `F.embedding`: convolutions, `addmm`,
            experts that are one tensor. Let go after the forward and gathered again in backward. `torch.compile` leaves
            such a module's forward out.
        config: Settings, see `GTPConfig`.
        init: Called as `init(name, tensor)` with each full tensor of a model on the meta device, to fill it in place,
            one at a time; refused for other models. Default: each module's `reset_parameters`.
        device: Where a model on the meta device goes. Default: the current CUDA device for NCCL groups, else the CPU.
        transport: A transport instance in place of the one that `config` names, for tests.

    Returns:
        The runtime. The model keeps it alive; keep it for `stats()`, `no_sync()` and the like.

    Raises:
        GTPValueError: bad group, pattern or parameter; nothing to shard; several devices.
        GTPStateError: the model was sharded already, is wrapped in DistributedDataParallel, or holds gradients.
        DesyncError: ranks call this with different models or settings.
    """
    config = GTPConfig() if config is None else config
    if not isinstance(config, GTPConfig):
        raise GTPValueError(f"config must be a GTPConfig, got {type(config).__name__}: write gtp.GTPConfig(...)")
    selection = select(
        model, group_or_mesh, include=include, exclude=exclude, unshard=unshard, min_numel=config.min_numel
    )
    _require_no_gradients(selection)
    _require_use_of_init(selection, init)
    readers = readers_of(model, [place for choice in selection.choices for place in choice.read_whole])
    target = _device_of(selection, device)
    layouts = _layouts(selection, config)
    require_agreement(selection, config, target)
    chosen, reason = (
        (transport, "given by the caller") if transport else choose_transport(config, _gtp_groups(selection), target)
    )
    runtime = GTPRuntime(config, chosen, target, reason)
    shards = materialize_meta(model, selection.choices, layouts, target, init)
    _broadcast_replicated(selection, target)
    for members in selection.groups:
        _register(runtime, members, layouts, shards)
    for choice in selection.choices:
        differentiable = choice.parameter.is_floating_point() or choice.parameter.is_complex()
        if not choice.sharded and choice.axes.all and differentiable:
            runtime.replicated.add(choice.name, choice.parameter, choice.axes.all)
    runtime.attach(model)
    watch_parameters(model)
    refuse_scripting(model)
    refuse_foreign_inputs(model)
    unshard_in_forward(readers)
    hook_state_dict(model)
    runtime.report = ParameterReport.of(selection.choices, layouts, selection.unregistered)
    runtime.start()
    _log.info("gtp: %s", runtime.report.summary())
    _warn(runtime.report)
    return runtime


def _warn(report: ParameterReport) -> None:
    """About what a user who wants 1/N of everything would not expect."""
    whole = [line for line in report.lines if line.is_unserved]
    share = sum(line.numel for line in whole) / max(report.num_parameters, 1)
    if share > _WORTH_A_WORD:
        largest = sorted(whole, key=lambda line: -line.numel)[:3]
        _log.warning(
            "gtp: %d%% of the model's elements stay whole on every rank, because their modules are no Linear or "
            "Embedding: %s%s. gtp.shard_model(unshard=...) shards them, too",
            round(100 * share),
            ", ".join(line.name for line in largest),
            ", ..." if len(whole) > len(largest) else "",
        )
    lost = [line.name for line in report.unregistered if line.trained]
    if lost:
        _log.warning(
            "gtp: torch does not know %s, which is kept in a plain attribute: it is neither sharded nor in "
            "model.parameters(). Use nn.ModuleList, nn.ModuleDict or nn.ParameterList",
            ", ".join(lost),
        )


def _gtp_groups(selection: Selection) -> list[dist.ProcessGroup]:
    """The distinct GTP groups of the sharded weights, in order."""
    return list(dict.fromkeys(c.axes.gtp for c in selection.choices if c.sharded))


def new_group(
    runtime: GTPRuntime,
    weights: Sequence[tuple[str, ShardLayout, torch.Tensor]],
    axes: Axes,
    *,
    shown: bool = False,
) -> WeightGroup:
    """The runtime's record of weights that are gathered together, registered with it.

    Args:
        weights: Per weight name, layout and shard, leader first.
        axes: GTP group and replicate group of all of them.
        shown: Whether the user's forwards see the full weights.
    """
    process_group, replicate = axes.gtp, axes.replicate
    dtype = runtime.config.param_dtype or weights[0][2].dtype
    members = [
        Member(name, layout.rows, layout.shard_rows, layout.trailing, shard, _send(shard, dtype), _no_owner)
        for name, layout, shard in weights
    ]
    leader = weights[0][0]
    group = WeightGroup(
        index=len(runtime.groups),
        name=leader if len(members) == 1 else f"{leader} (+{len(members) - 1})",
        members=members,
        process_group=process_group,
        rank=process_group.rank(),
        size=process_group.size(),
        replicate_group=replicate if replicate is not None and replicate.size() > 1 else None,
        compute_dtype=dtype,
        shown=shown,
    )
    runtime.add_group(group)
    return group


def convert(
    parameter: nn.Parameter,
    runtime: GTPRuntime,
    group: WeightGroup,
    position: int,
    layout: ShardLayout,
    kind: type[GTPWeight] = GTPWeight,
) -> GTPWeight:
    """Turns `parameter` into the GTPWeight of `group.members[position]`."""
    member = group.members[position]
    handle = WeightHandle(member.name, layout, runtime, group, position, runtime.config.grad_dtype)
    return kind.convert(parameter, member.shard, handle)


def _register(
    runtime: GTPRuntime, members: list[Choice], layouts: dict[str, ShardLayout], shards: dict[str, torch.Tensor]
) -> None:
    weights = []
    for choice in members:
        layout = layouts[choice.name]
        shard = shards.get(choice.name)
        if shard is None:
            full = choice.parameter.detach().contiguous()
            broadcast_first(full, choice.axes)
            shard = take_shard(full, layout, full.device)
        weights.append((choice.name, layout, shard))
    group = new_group(runtime, weights, members[0].axes, shown=any(choice.read_whole for choice in members))
    for position, choice in enumerate(members):
        convert(choice.parameter, runtime, group, position, layouts[choice.name])


def _send(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return shard if shard.dtype == dtype else shard.to(dtype)


def _no_owner() -> ShardOwner | None:
    return None


def _require_no_gradients(selection: Selection) -> None:
    for choice in selection.choices:
        if choice.parameter.grad is not None:
            raise GTPStateError(
                f"{choice.name}: it holds a gradient, which gtp cannot tell to be reduced or not. Call "
                "model.zero_grad() (or take the optimizer step) before gtp.shard_model"
            )


def _require_use_of_init(selection: Selection, init: Callable[[str, torch.Tensor], None] | None) -> None:
    on_meta = any(c.parameter.is_meta for c in selection.choices) or any(b.value.is_meta for b in selection.buffers)
    if init is not None and not on_meta:
        raise GTPValueError(
            "init= fills the tensors of a model on the meta device, and nothing of this one is: it would never be "
            "called. Initialize the model before gtp.shard_model, or build it under torch.device('meta')"
        )


def _device_of(selection: Selection, wanted: torch.device | str | None) -> torch.device:
    devices = {choice.parameter.device for choice in selection.choices}
    real = sorted(str(d) for d in devices if d.type != "meta")
    if len(real) > 1:
        raise GTPValueError(f"the model lies on several devices ({', '.join(real)}); gtp shards a model on one device")
    if real:
        found = torch.device(real[0])
        if wanted is not None and torch.device(wanted).type != found.type:
            raise GTPValueError(
                f"device={wanted!r} is for models on the meta device; this one is on {found}: move it first"
            )
        return found
    if wanted is not None:
        return torch.device(wanted)
    backend = dist.get_backend(selection.choices[0].axes.gtp)
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")


def _layouts(selection: Selection, config: GTPConfig) -> dict[str, ShardLayout]:
    return {
        c.name: ShardLayout(tuple(c.parameter.shape), c.axes.gtp.size(), c.axes.gtp.rank(), config.alignment)
        for c in selection.choices
        if c.sharded
    }


def _broadcast_replicated(selection: Selection, device: torch.device) -> None:
    for choice in selection.choices:
        if not choice.sharded:
            broadcast_first(choice.parameter.detach(), choice.axes)
    for buffer in selection.buffers:
        if buffer.axes.all:
            broadcast_first_bytes(buffer.value, buffer.axes, device)

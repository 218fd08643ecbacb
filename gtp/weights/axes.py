"""`Axes`: the process groups a weight is sharded and replicated over, from what users hand to `shard_model`."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gtp.errors import GTPValueError

GroupOrMesh = dist.ProcessGroup | DeviceMesh


@dataclasses.dataclass(frozen=True)
class Axes:
    """Where a weight lives.

    Attributes:
        gtp: The group that its rows are split over.
        replicate: The group over which each shard is held alike, or None.
    """

    gtp: dist.ProcessGroup
    replicate: dist.ProcessGroup | None = None

    @property
    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups that a replicated parameter's gradient is reduced over. Groups of one are left out."""
        groups = (self.gtp,) if self.replicate is None else (self.gtp, self.replicate)
        return tuple(group for group in groups if group.size() > 1)

    @staticmethod
    def of(group_or_mesh: GroupOrMesh) -> Axes:
        """Validates a process group, a 1-d mesh (gtp) or a 2-d mesh (replicate, gtp).

        Raises:
            GTPValueError: torch.distributed is not initialized, this rank is not in the group, or it is something else.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise GTPValueError(
                "gtp.shard_model needs an initialized process group: call torch.distributed.init_process_group() "
                "(torchrun sets the environment it reads), then pass torch.distributed.group.WORLD, a subgroup or a "
                "DeviceMesh"
            )
        if isinstance(group_or_mesh, DeviceMesh):
            mesh = group_or_mesh
            if mesh.get_coordinate() is None:
                raise GTPValueError(f"rank {dist.get_rank()} is not in {mesh}: shard on the ranks of the mesh only")
            if mesh.ndim == 1:
                return Axes(mesh.get_group())
            if mesh.ndim == 2:
                return Axes(mesh.get_group(1), mesh.get_group(0))
            raise GTPValueError(
                f"gtp takes a 1-d mesh (gtp) or a 2-d mesh (replicate, gtp), got {mesh.ndim} dims: {mesh}. Slice it, "
                "as in mesh['replicate', 'gtp']"
            )
        given: object = group_or_mesh
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise GTPValueError(
                f"rank {dist.get_rank()} is not in the group it was given: torch.distributed.new_group returns a "
                "placeholder on ranks outside; call gtp.shard_model on the members only, each with its own group"
            )
        if not isinstance(group_or_mesh, dist.ProcessGroup):
            raise GTPValueError(
                f"gtp.shard_model takes a ProcessGroup or a DeviceMesh, got {type(group_or_mesh).__name__}: "
                f"{group_or_mesh!r}. For all ranks pass torch.distributed.group.WORLD"
            )
        if dist.get_rank(group_or_mesh) < 0:
            raise GTPValueError(f"rank {dist.get_rank()} is not in the given group; shard on its members only")
        return Axes(group_or_mesh)


def broadcast_first(tensor: torch.Tensor, axes: Axes) -> None:
    """Puts the first rank's values into `tensor` on all ranks of both axes. Collective."""
    contiguous = tensor.contiguous()
    for process_group in reversed(axes.all):
        dist.broadcast(contiguous, src=dist.get_global_rank(process_group, 0), group=process_group)
    if contiguous is not tensor:
        tensor.copy_(contiguous)


def broadcast_first_bytes(tensor: torch.Tensor, axes: Axes, device: torch.device) -> None:
    """`broadcast_first` for a dense tensor of any dtype, on any device; its bytes travel through `device`. Collective.

    Written only where the values differ: it may be an expanded view, which cannot be written.
    """
    data = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    own = data.clone()
    broadcast_first(data, axes)
    if not torch.equal(data, own):
        with torch.no_grad():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def data_size(group_or_mesh: GroupOrMesh) -> int:
    """Ranks that see different data: all of a group or 1-d mesh, both axes of a 2-d mesh.

    By this a batch grows from rank to global, and sample counters with it. Argument as for `gtp.shard_model`.
    """
    return math.prod(group.size() for group in Axes.of(group_or_mesh).all)


def data_mean(value: torch.Tensor | float, group_or_mesh: GroupOrMesh) -> torch.Tensor:
    """The mean of a number (a loss, a metric) over all ranks that see different data. Collective.

    Args:
        value: Any shape, the same on all ranks; not changed. Python numbers go through the CPU, so they need a group
            with a CPU backend.
        group_or_mesh: As given to `gtp.shard_model`.

    Returns:
        The mean, in fp32 (fp64 for fp64), detached, the same on all ranks.
    """
    given = torch.as_tensor(value).detach()
    mean = given.to(torch.promote_types(given.dtype, torch.float32), copy=True).contiguous()
    for process_group in Axes.of(group_or_mesh).all:
        dist.all_reduce(mean, group=process_group)
    return mean / data_size(group_or_mesh)

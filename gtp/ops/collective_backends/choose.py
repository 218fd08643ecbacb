"""`gemm_backend`: from the name that `tp_gemm_backend` holds to a backend. What cannot be served is refused here."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gtp.errors import GTPValueError
from gtp.ops.collective_backends.base import GemmBackend
from gtp.ops.collective_backends.collective import CollectiveBackend, SingleRankBackend

BackendName = Literal["auto", "collective", "symm_mem", "copy_engine"]

_log = logging.getLogger("gtp")


def gemm_backend(
    backend: BackendName | GemmBackend,
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    device: torch.device | str | None = None,
    debug: bool = False,
    peer_timeout: float = 600.0,
) -> GemmBackend:
    """The backend that moves activations of a tensor-parallel group. Collective over the group.

    Share one between all modules of a model: the CUDA backends own a workspace in symmetric memory.

    Args:
        backend: `"collective"`: a collective, then the GEMM; runs everywhere. `"symm_mem"`: torch's fused operators.
            `"copy_engine"`: peer copies under a split GEMM. `"auto"`: where peer copies work, for each product what was
            measured to be fastest (see `AutoBackend`), else `"collective"`. A `GemmBackend` is returned as it is, if it
            is one of this group, or both have one rank.
        group: The tensor-parallel group, or a 1-d mesh. None or a group of one rank: the GEMM alone, whatever the name.
        device: Where the activations will be. Default: the current CUDA device where there is one, else the CPU.
        debug: Compare every call with the other ranks' before it starts (see `Agreement`).
        peer_timeout: Seconds that `"copy_engine"` waits for a rank that does not come before `PeerError` names it.
            Collectives have the time-out of their process group; torch's fused operators wait for ever.

    Raises:
        GTPValueError: an unknown name, a mesh of several dims, a backend of another group, or a group or device that
            the backend named cannot serve.
    """
    process_group = None if group is None else resolve_group(group)
    if isinstance(backend, GemmBackend):
        alone = backend.size == 1 and (process_group is None or process_group.size() == 1)
        if backend.process_group is not process_group and not alone:
            name = "no group" if process_group is None else process_group.group_name
            raise GTPValueError(
                f"tp_gemm_backend: {backend!r} belongs to another group than the module's ({name}): make the backend "
                "with gtp.ops.gemm_backend(name, group) over the module's own group"
            )
        return backend
    if backend not in get_args(BackendName):
        raise GTPValueError(
            f"tp_gemm_backend must be one of {', '.join(map(repr, get_args(BackendName)))} or a GemmBackend, got "
            f"{backend!r}"
        )
    target = _device(device)
    if process_group is None or process_group.size() == 1:
        return SingleRankBackend()
    if backend == "collective":
        return CollectiveBackend(process_group, debug=debug)
    problem = _why_not(process_group, target)
    if problem is None and backend == "copy_engine":
        from gtp.ops.collective_backends.copy_engine import CopyEngineBackend

        return CopyEngineBackend(process_group, target, debug=debug, peer_timeout=peer_timeout)
    if problem is None and backend == "auto":
        from gtp.ops.collective_backends.auto import AutoBackend

        return AutoBackend(process_group, target, debug=debug, peer_timeout=peer_timeout)
    if backend == "auto":
        _log.info("gtp: tp_gemm_backend='auto' runs 'collective' over %s: %s", process_group.group_name, problem)
        return CollectiveBackend(process_group, debug=debug)
    if problem is not None:
        raise GTPValueError(
            f"tp_gemm_backend={backend!r} cannot serve group {process_group.group_name}: {problem}. Use 'collective', "
            "which runs everywhere, or 'auto' to let gtp choose"
        )
    from gtp.ops.collective_backends.symm_mem import SymmMemBackend

    return SymmMemBackend(process_group, target, debug=debug)


def resolve_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group of a group or of a 1-d mesh.

    Raises:
        GTPValueError: a mesh of several dims, or something else.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise GTPValueError(
                f"the tensor-parallel mesh must have one dim, got {group.ndim} ({group.mesh_dim_names}): pass the "
                "axis, such as mesh['tp']"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise GTPValueError(
            f"the tensor-parallel group must be a ProcessGroup or a 1-d DeviceMesh, got {type(group).__name__}"
            + (": this rank is not a member of the group" if group is dist.GroupMember.NON_GROUP_MEMBER else "")
        )
    return group


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None and torch.device(device).type != "meta":
        device = torch.device(device)
        if device.type != "cuda" or device.index is not None:
            return device
    # what is built on the meta device, or without saying where, runs on the accelerator if there is one
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _why_not(process_group: dist.ProcessGroup, device: torch.device) -> str | None:
    from gtp.ops.peer import why_not

    return why_not(process_group, device)

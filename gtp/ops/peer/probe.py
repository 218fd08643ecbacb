"""`why_not`: whether the ranks of a group can reach each other's memory, and if not, the reason in words."""

from __future__ import annotations

import ctypes
import os
import socket

import torch
import torch.distributed as dist


def why_not(process_group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why peer copies do not work over this group, or None if they do. Collective, unless `device` is not CUDA.

    All ranks get the same answer, so that they decide alike. It asks the hardware and the driver; it does not try.
    """
    if device.type != "cuda":
        return f"{device.type} has no copy engines to peers"
    mine = (socket.gethostname(), _uuid(device), _local_problem(device))
    everyone: list[tuple[str, str, str | None]] = [mine] * process_group.size()
    if process_group.size() > 1:
        dist.all_gather_object(everyone, mine, group=process_group)
    for rank, (_, _, problem) in enumerate(everyone):
        if problem is not None:
            return f"rank {rank} of group {process_group.group_name}: {problem}"
    hosts = sorted({host for host, _, _ in everyone})
    if len(hosts) > 1:
        return f"group {process_group.group_name} spans {len(hosts)} hosts ({', '.join(hosts[:4])})"
    return _agree(process_group, _link_problem(process_group, device, [uuid for _, uuid, _ in everyone]))


def _local_problem(device: torch.device) -> str | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver library cannot be loaded ({error})"
    if not hasattr(library, "cuStreamBatchMemOp_v2"):
        return "the CUDA driver is older than 12.0 and has no batched stream memory operations"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    major, _ = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


def _link_problem(process_group: dist.ProcessGroup, device: torch.device, uuids: list[str]) -> str | None:
    shared = len(set(uuids)) < len(uuids)
    if shared:
        if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
            return (
                f"ranks of group {process_group.group_name} share a GPU (for tests this can be allowed with the "
                "environment variable TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1)"
            )
        return None
    visible = {_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    for rank, uuid in enumerate(uuids):
        peer = visible.get(uuid)
        if peer is None or peer == device.index:
            continue  # hidden by CUDA_VISIBLE_DEVICES: the driver maps it all the same
        if not torch.cuda.can_device_access_peer(device, peer):
            return f"GPU {device.index} cannot access the memory of GPU {peer} (rank {rank}): no peer-to-peer link"
    return None


def _agree(process_group: dist.ProcessGroup, problem: str | None) -> str | None:
    """The first rank's problem, on all ranks."""
    if process_group.size() == 1:
        return problem
    problems: list[str | None] = [None] * process_group.size()
    dist.all_gather_object(problems, problem, group=process_group)
    return next((p for p in problems if p is not None), None)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)

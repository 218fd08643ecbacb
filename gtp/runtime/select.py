"""`choose_transport`: from the name in the config to a transport, with the reason. Never silent."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gtp.config import GTPConfig
from gtp.errors import UnsupportedError
from gtp.runtime.process_group import ProcessGroupTransport
from gtp.runtime.transport import Transport


def choose_transport(
    config: GTPConfig, process_groups: Sequence[dist.ProcessGroup], device: torch.device
) -> tuple[Transport, str]:
    """The transport that `config.transport` asks for on these groups, and why it was taken. Collective on CUDA.

    Raises:
        UnsupportedError: the copy engine was asked for by name where it does not work.
    """
    if config.transport == "process_group":
        return ProcessGroupTransport(device), "asked for"
    problem = _copy_engine_problem(config, process_groups, device)
    if problem is None:
        from gtp.runtime.copy_engine import CopyEngineTransport

        transport = CopyEngineTransport(
            device, map_shards=config.map_shards, reduce_sms=config.reduce_sms, peer_timeout=config.peer_timeout
        )
        reason = "asked for" if config.transport == "copy_engine" else "all ranks reach each other's memory"
        return transport, reason
    if config.transport == "copy_engine":
        raise UnsupportedError(
            f'GTPConfig(transport="copy_engine"): {problem}. Use "process_group", or "auto" to let gtp choose'
        )
    return ProcessGroupTransport(device), f"the copy engine does not serve here: {problem}"


def _copy_engine_problem(
    config: GTPConfig, process_groups: Sequence[dist.ProcessGroup], device: torch.device
) -> str | None:
    """Collective on CUDA: all ranks get the same answer."""
    if device.type != "cuda":
        return f"the weights are on {device.type}, which has no copy engines"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed, which compiles the addition of gradients"
    if config.transport == "auto" and all(group.size() == 1 for group in process_groups):
        return "every group has one rank"
    from gtp.ops.peer import why_not

    for group in process_groups:
        problem = why_not(group, device)
        if problem is not None:
            return problem
    return None

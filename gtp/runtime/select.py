"""`choose_transport`: from the name in the config to a transport, with the reason. Never silent."""

from __future__ import annotations

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
    """The transport that `config.transport` asks for on these groups, and why it was taken.

    Raises:
        UnsupportedError: the copy engine was asked for by name where it does not work.
    """
    if config.transport == "process_group":
        return ProcessGroupTransport(device), "asked for"
    problem = f"{device.type} has no copy engine" if device.type != "cuda" else "not available"
    if config.transport == "copy_engine":
        raise UnsupportedError(
            f'GTPConfig(transport="copy_engine"): {problem}. Use "process_group", or "auto" to let gtp choose'
        )
    return ProcessGroupTransport(device), problem

"""`Saved`: the table of contents of a torch.distributed.checkpoint (DCP) folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from gtp.errors import GTPValueError


class Saved:
    """What a checkpoint holds, by path: `("optim", "state", "head.weight", "exp_avg")`. Local; reads no tensor.

    Args:
        path: The folder, for errors.
        reader: DCP's reader of it.
        metadata: What DCP wrote about it.
    """

    def __init__(self, path: str, reader: Any, metadata: Any) -> None:
        self.path = path
        self.reader = reader
        self._tree: dict[str | int, Any] = {}
        # DCP flattens nested state dicts, and remembers how
        paths = metadata.planner_data or {}
        for key, entry in metadata.state_dict_metadata.items():
            *above, last = paths.get(key, (key,))
            node = self._tree
            for item in above:
                node = node.setdefault(item, {})
            node[last] = entry

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Saved:
        """Opens a folder.

        Raises:
            GTPValueError: there is no complete checkpoint.
        """
        from torch.distributed.checkpoint import FileSystemReader

        reader = FileSystemReader(path)
        try:
            metadata = reader.read_metadata()
        except FileNotFoundError as error:
            raise GTPValueError(
                f"{os.fspath(path)}: no checkpoint there ({error.filename} is missing, which is written last, when "
                "a save is complete)"
            ) from error
        return Saved(os.fspath(path), reader, metadata)

    def names(self, *path: str) -> list[str]:
        """What lies directly below a path; nothing if it is a leaf or not there."""
        node = self._at(path)
        return [str(item) for item in node] if isinstance(node, dict) else []

    def tensor(self, path: Sequence[str]) -> Any:
        """DCP's description of a tensor (`size`, `properties.dtype`), or None if there is no tensor at `path`."""
        node = self._at(path)
        return node if hasattr(node, "chunks") else None

    def require_shape(self, path: Sequence[str], shape: Sequence[int]) -> None:
        """Raises GTPValueError unless there is a tensor of this shape."""
        entry = self.tensor(path)
        if entry is None or tuple(entry.size) != tuple(shape):
            found = "no tensor" if entry is None else f"shape {tuple(entry.size)}"
            raise GTPValueError(
                f"{'.'.join(path[1:])}: {self.path} holds {found}, and the (logical) shape here is {tuple(shape)}"
            )

    def placeholder(self, path: Sequence[str], device: torch.device | None = None) -> Any:
        """Something of the structure of what is at `path` for DCP to fill: it writes into tensors, replaces objects."""
        return _placeholder(self._at(path), device)

    def _at(self, path: Sequence[str]) -> Any:
        node: Any = self._tree
        for item in path:
            node = node.get(item) if isinstance(node, dict) else None
        return node


def _placeholder(node: Any, device: torch.device | None) -> Any:
    if hasattr(node, "chunks"):
        return torch.empty(node.size, dtype=node.properties.dtype, device=device)
    if not isinstance(node, dict):
        return None
    children = {item: _placeholder(child, device) for item, child in node.items()}
    if children and all(isinstance(item, int) for item in children):
        return [children.get(i) for i in range(max(map(int, children)) + 1)]
    return children

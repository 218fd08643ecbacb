"""`PagedArena`: blocks of whole pages on every rank of a group, mapped by all, each of which can be mapped again."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from gtp.ops.peer.pages import Block, Mapping, Pages

# Descriptors of one rank on their way. The kernel bounds those of all ranks of a host's user together by one process's
# limit on open files, often 1024.
_ON_THEIR_WAY = 64
_TIMEOUT = 60.0  # seconds that a peer may take to hand over its blocks


class PagedArena:
    """Memory of the same sizes on every rank. It lives as long as this or a tensor over `local`, contents are whatever.

    Attributes:
        blocks: This rank's, one per size, at consecutive addresses.
        local: uint8 over them.
        pointers: Per rank, the address of its first block as mapped here.
    """

    def __init__(self, blocks: Sequence[Block], own: Mapping, peers: dict[int, Mapping], size: int) -> None:
        self.blocks = tuple(blocks)
        self.local = own.tensor()
        self._peers = peers
        self.pointers: Sequence[int] = tuple(
            peers[rank].address if rank in peers else own.address for rank in range(size)
        )


PagedArenaFactory = Callable[[Sequence[int], dist.ProcessGroup, Pages], tuple[PagedArena | None, str | None]]
"""`make_paged_arena`, or what stands for it."""


def make_paged_arena(
    sizes: Sequence[int], process_group: dist.ProcessGroup, pages: Pages
) -> tuple[PagedArena | None, str | None]:
    """An arena of blocks of these bytes, the same on all ranks; or None and why not, the same on all ranks, too.

    Collective. Ranks of one host hand each other their blocks over a socket in the file system for temporary files.

    Args:
        sizes: Multiples of the page.
        process_group: Its ranks run on one host.
        pages: This rank's.
    """
    exchange = _Exchange(process_group, pages)
    try:
        return exchange.run(sizes), None
    except _Refused as refused:
        return None, str(refused)
    finally:
        exchange.close()


class _Refused(Exception):
    """Some rank could not do its part."""


def _what(error: Exception) -> str:
    return str(error) or type(error).__name__


class _Exchange:
    """Steps, after each of which all ranks know whether all have come through it.

    Whatever is raised within a step is told: the others would wait for ever for a rank that left.
    """

    def __init__(self, process_group: dist.ProcessGroup, pages: Pages) -> None:
        self._group = process_group
        self._rank, self._size = process_group.rank(), process_group.size()
        self._pages = pages
        self._directory = ""
        self._open: list[socket.socket] = []

    def run(self, sizes: Sequence[int]) -> PagedArena:
        blocks: list[Block] = []
        own, listener, path, problem = None, None, "", None
        try:
            blocks = [Block(self._pages, nbytes, shared=True) for nbytes in sizes]
            own = Mapping(self._pages, blocks)
            self._directory = tempfile.mkdtemp(prefix="gtp-")  # readable by this user alone
            path = os.path.join(self._directory, "blocks")
            listener = self._socket()
            listener.bind(path)
            listener.listen(self._size)
        except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
            problem = _what(error)
        said = self._all(problem, (path, tuple(sizes)))
        if len({wanted for _, wanted in said}) > 1:
            raise _Refused(f"ranks of group {self._group.group_name} want blocks of different sizes")
        to, of = self._connect(listener, [path for path, _ in said])
        theirs: dict[int, list[Block]] = {peer: [] for peer in of}
        at_a_time = max(_ON_THEIR_WAY // max(self._size - 1, 1), 1)
        for start in range(0, len(blocks), at_a_time):
            self._hand_over(blocks[start : start + at_a_time], to, of, theirs)
        arena, problem = None, None
        try:
            assert own is not None  # else all ranks had been told
            peers = {peer: Mapping(self._pages, known) for peer, known in theirs.items()}
            arena = PagedArena(blocks, own, peers, self._size)
        except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
            problem = _what(error)
        self._all(problem)
        assert arena is not None  # likewise
        return arena

    def close(self) -> None:
        for each in self._open:
            each.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _connect(
        self, listener: socket.socket | None, paths: Sequence[str]
    ) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
        """Sockets to the other ranks, and those on which they connected to this one."""
        to: dict[int, socket.socket] = {}
        of: dict[int, socket.socket] = {}
        problem = None
        try:
            assert listener is not None
            for step in range(1, self._size):
                peer = (self._rank + step) % self._size
                to[peer] = self._socket()
                to[peer].connect(paths[peer])
                to[peer].send(struct.pack("i", self._rank))
            for _ in range(1, self._size):
                connection, _ = listener.accept()
                self._open.append(connection)
                connection.settimeout(_TIMEOUT)
                of[struct.unpack("i", connection.recv(4))[0]] = connection
        except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
            problem = f"no socket to another rank: {_what(error)}"
        self._all(problem)
        return to, of

    def _hand_over(
        self,
        blocks: Sequence[Block],
        to: dict[int, socket.socket],
        of: dict[int, socket.socket],
        theirs: dict[int, list[Block]],
    ) -> None:
        """Sends blocks to all others, and takes as many of the same sizes from each."""
        problem = None
        try:
            mine = []
            try:
                for block in blocks:
                    mine.append(self._pages.export(block.handle))
                for connection in to.values():
                    socket.send_fds(connection, [b"b"], mine)
            finally:
                for descriptor in mine:
                    os.close(descriptor)
        except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
            problem = _what(error)
        self._all(problem)  # nobody waits for what is not on its way
        try:
            for peer, connection in of.items():
                _, arrived, _, _ = socket.recv_fds(connection, 1, len(blocks))
                try:
                    if len(arrived) != len(blocks):
                        raise OSError(f"{len(arrived)} of {len(blocks)} blocks of rank {peer} arrived")
                    for block, descriptor in zip(blocks, arrived, strict=True):
                        handle = self._pages.import_(descriptor)
                        theirs[peer].append(Block(self._pages, block.nbytes, handle))
                finally:
                    for descriptor in arrived:
                        os.close(descriptor)
        except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
            problem = _what(error)
        self._all(problem)

    def _socket(self) -> socket.socket:
        self._open.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._open[-1].settimeout(_TIMEOUT)
        return self._open[-1]

    def _all(self, problem: str | None, what: Any = None) -> list[Any]:
        """What all ranks say, if none has a problem."""
        said: list[tuple[str | None, Any]] = [(problem, what)] * self._size
        dist.all_gather_object(said, (problem, what), group=self._group)
        for rank, (trouble, _) in enumerate(said):
            if trouble is not None:
                raise _Refused(f"rank {rank} of group {self._group.group_name}: {trouble}")
        return [each for _, each in said]

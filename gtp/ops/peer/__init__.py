"""Peer-to-peer building blocks: memory mapped between ranks, copies by copy engines, signals without an SM.

why = why_not(group, device)            # None, or the reason in words
arena = SymmetricArena(nbytes, group, device)
driver = CudaDriver(device)
driver.copy(dst, arena.pointers[peer] + offset, nbytes, stream)
hands = Handshake(driver, rank, [p + flags_at for p in arena.pointers])
driver.submit(hands.post, stream)       # see [Note: signals that replay] for the four moves
"""

from gtp.ops.peer.driver import CudaDriver, Driver, SignalOp, Wait, Write, current_capture
from gtp.ops.peer.handshake import WORD, Handshake
from gtp.ops.peer.memory import Arena, ArenaFactory, LocalArena, SymmetricArena, aligned
from gtp.ops.peer.paged import PagedArena, PagedArenaFactory, make_paged_arena
from gtp.ops.peer.pages import Block, CudaPages, Mapping, Pages
from gtp.ops.peer.probe import why_not
from gtp.ops.peer.watchdog import Watch, Watchdog

__all__ = [
    "WORD",
    "Arena",
    "ArenaFactory",
    "Block",
    "CudaDriver",
    "CudaPages",
    "Driver",
    "Handshake",
    "LocalArena",
    "Mapping",
    "PagedArena",
    "PagedArenaFactory",
    "Pages",
    "SignalOp",
    "SymmetricArena",
    "Wait",
    "Watch",
    "Watchdog",
    "Write",
    "aligned",
    "current_capture",
    "make_paged_arena",
    "why_not",
]

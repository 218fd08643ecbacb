"""`Watchdog`: turns a wait for a rank that never comes into an error that names it.

A stream that waits for a peer's flag waits for ever, and the host with it. Around each such wait the stream sets and
clears a marker in host memory. A thread looks at the markers; one that stays set while nothing of this rank moves for
`timeout` seconds belongs to a rank that died, stalled or took another path. The flags say which. The thread then sets
all of this rank's flags, so that its streams run out (on worthless data) and the host is free to see the error, which
every later call raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, PeerError
from gtp.ops.peer.handshake import WORD

_log = logging.getLogger("gtp")

WATCHDOG_THREAD = "gtp-watchdog"
_MOST_SITES = 1024
_RUN_OUT = 10.0  # seconds that streams get to run out when memory goes; a collective with a lost rank takes longer
_LOOK = 1.0  # seconds of looking without a pause, before a rank is given up


class Watched(Protocol):
    """Who owns flags: peer memory of one process group."""

    process_group: dist.ProcessGroup

    def flags(self) -> torch.Tensor:
        """This rank's flag words, int32."""
        ...


Watch = Callable[[Watched, str, Mapping[int, int]], int]
"""`Watchdog.site`: given an owner of flags, what a rank that does not come has failed to do, and per peer the index of
the flag that a wait is for: the address of a word that is 1 while a stream waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    """A prepared wait of this rank: for what, and the index of each peer's flag."""

    owner: weakref.ref[Watched]
    absent: str
    flags: Mapping[int, int]


class Watchdog:
    """Watches the waits of one user of peer memory.

    Args:
        device: Where the flags are.
        timeout: Seconds without progress after which a wait counts as lost.
        advice: The error's last words: what ranks must do alike, and how the time is set.
    """

    def __init__(self, device: torch.device, timeout: float, advice: str) -> None:
        self._device = device
        self._timeout = timeout
        self._advice = advice
        self._markers = torch.zeros(_MOST_SITES, dtype=torch.int32).pin_memory()
        self._ticks = torch.zeros(1, dtype=torch.int32, device=device)
        self._ticked = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._sites: list[_Site] = []
        self._stream = torch.cuda.Stream(device)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def site(self, owner: Watched, absent: str, flags: Mapping[int, int]) -> int:
        """One more wait to watch.

        Args:
            owner: Whose flags are waited for. Not kept alive; the site is free again when it is gone.
            absent: What a rank that does not come has failed to do: "to begin its forward".
            flags: Per peer, the index of its flag.

        Returns:
            The address of the wait's marker: a word that the stream sets to 1 while it waits.
        """
        made = _Site(weakref.ref(owner), absent, flags)
        if len(self._sites) < _MOST_SITES:
            self._sites.append(made)
            return self._address(len(self._sites) - 1)
        for index, site in enumerate(self._sites):
            if site.owner() is None:
                self._sites[index] = made
                self._markers[index] = 0
                return self._address(index)
        raise GTPStateError(f"more than {_MOST_SITES} waits to watch: use fewer process groups")

    def _address(self, index: int) -> int:
        return self._markers.data_ptr() + WORD * index

    def start(self) -> None:
        """From here on somebody looks."""
        # The thread must not keep a deleted model's memory alive.
        self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._stopped), daemon=True)
        self._thread.name = WATCHDOG_THREAD
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; after a rank was lost, not before the device is idle or seconds have passed.

        What waits there ends because the thread answers, and memory, which goes next, waits for the device.
        """
        try:
            if self.failed and threading.current_thread().name != WATCHDOG_THREAD:
                idle = threading.Thread(target=self._wait_for_device, daemon=True)
                idle.start()
                idle.join(_RUN_OUT)
        except RuntimeError:
            pass  # Python is ending and starts no threads; nothing is freed then, and nothing waits
        finally:
            self._stopped.set()

    def __del__(self) -> None:
        self._stopped.set()

    def _wait_for_device(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that has failed is as idle as it gets
            torch.cuda.synchronize(self._device)

    def tick(self) -> None:
        """Progress, in the order of the current stream. Queued, so that a graph's replays count as well.

        For waits that may last nearly all the time. Others need no ticks: see `moves`.
        """
        self._ticks.add_(1)
        self._ticked.copy_(self._ticks, non_blocking=True)

    @property
    def failed(self) -> bool:
        """Whether a rank was lost."""
        return self._failure is not None

    def check(self) -> None:
        """Raises if a rank was lost.

        Raises:
            PeerError: with the rank, the group and what it did not do.
        """
        if self._failure is not None:
            raise PeerError(self._failure)

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(self._timeout / 8, 5.0)

    @property
    def timeout(self) -> float:
        return self._timeout

    def state(self) -> tuple[int, ...]:
        """Changes whenever this rank gets anywhere: marked sites, and the count of lines."""
        markers = self._markers[: len(self._sites)].tolist()
        return (int(self._ticked[0]), *(site for site, marked in enumerate(markers) if marked))

    def moves(self) -> bool:
        """Looks closely for a while. Whether this rank gets anywhere, if only from a wait to the same wait again."""
        state, until = self.state(), time.monotonic() + min(_LOOK, self._timeout / 4)
        while time.monotonic() < until:
            if self.state() != state:
                return True
            time.sleep(0)
        return False

    def give_up(self, sites: tuple[int, ...]) -> None:
        """Names the missing ranks and lets this rank's streams run out."""
        with _any_capture_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            lost = [text for index in sites for text in self._missing(self._sites[index])]
            self._failure = (
                f"rank {dist.get_rank()} has waited {self._timeout:g} s {'; '.join(lost or ['for an unknown rank'])}. "
                f"It has died, is stuck, or does something else than this rank: {self._advice}. Results since are "
                "worthless"
            )
            _log.error("gtp: %s", self._failure)
            while not self._stopped.wait(0.1):
                for owner in {id(owner): owner for site in self._sites if (owner := site.owner())}.values():
                    owner.flags().fill_(1)

    def _missing(self, site: _Site) -> list[str]:
        owner = site.owner()
        if owner is None:
            return []
        words = owner.flags().cpu().tolist()
        missing = [peer for peer, index in site.flags.items() if not words[index]]
        if not missing:
            return []
        ranks = ", ".join(str(dist.get_global_rank(owner.process_group, rank)) for rank in missing)
        return [f"for rank {ranks} of group {owner.process_group.group_name} {site.absent}"]


def _watch(reference: weakref.ref[Watchdog], stopped: threading.Event) -> None:
    last: tuple[int, ...] = ()
    since = time.monotonic()
    while True:
        watchdog = reference()
        if watchdog is None:
            return
        interval, timeout = watchdog.interval, watchdog.timeout
        state, now = watchdog.state(), time.monotonic()
        if state != last or len(state) == 1:
            last, since = state, now
        elif now - since > timeout:
            if not watchdog.moves():
                watchdog.give_up(state[1:])
                return
            since = time.monotonic()
        del watchdog  # not held while asleep
        if stopped.wait(interval):
            return


class _any_capture_mode:
    """This thread's CUDA calls are no part of another thread's graph capture, and do not break it."""

    _RELAXED = 2

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(self._RELAXED)
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))

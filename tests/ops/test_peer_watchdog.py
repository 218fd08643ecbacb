"""When the watchdog gives up on a rank: only if a wait stays marked and nothing of this rank moves."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from gtp.ops.peer import watchdog as watchdog_module
from gtp.ops.peer.watchdog import Watchdog, _watch


class Waits:
    """A rank whose state follows a script of time."""

    interval = 0.005

    def __init__(self, timeout: float, script: Callable[[float], tuple[int, ...]]) -> None:
        self.timeout = timeout
        self._script = script
        self._begin = time.monotonic()
        self.gave_up: tuple[float, tuple[int, ...]] | None = None

    def state(self) -> tuple[int, ...]:
        return self._script(time.monotonic() - self._begin)

    @property
    def _timeout(self) -> float:
        return self.timeout

    moves = Watchdog.moves

    def give_up(self, sites: tuple[int, ...]) -> None:
        self.gave_up = (time.monotonic() - self._begin, sites)


def watch(waits: Waits, seconds: float) -> tuple[float, tuple[int, ...]] | None:
    stopped = threading.Event()
    thread = threading.Thread(target=_watch, args=(weakref.ref(waits), stopped))
    thread.start()
    thread.join(seconds)
    stopped.set()
    thread.join()
    return waits.gave_up


def test_a_wait_that_lasts_is_given_up_with_its_sites() -> None:
    gave_up = watch(Waits(0.2, lambda t: (5, 3, 8)), 2.0)
    assert gave_up is not None
    assert gave_up[0] > 0.2
    assert gave_up[1] == (3, 8)


@pytest.mark.parametrize(
    "script",
    [
        lambda t: (5,),  # idle for ever
        lambda t: (int(t / 0.1), 3),  # always found waiting, but lines come and go
        lambda t: (5, 3) if int(t / 0.1) % 2 else (5, 4),  # waits here and there
        lambda t: (5, 3) if t < 0.2 else (5,),  # the rank came
        # at every look in the same wait, but between looks out of it: only a close look tells
        lambda t: (5, 3) if t < 0.31 or int(t / 0.001) % 4 else (5,),
    ],
    ids=["idle", "lines", "sites", "late", "the same wait again and again"],
)
def test_progress_of_any_kind_counts(script: Callable[[float], tuple[int, ...]]) -> None:
    assert watch(Waits(0.3, script), 0.8) is None


def test_the_thread_ends_with_its_transport() -> None:
    waits = Waits(10.0, lambda t: (0,))
    thread = threading.Thread(target=_watch, args=(weakref.ref(waits), threading.Event()))
    thread.start()
    del waits
    thread.join(2.0)
    assert not thread.is_alive()


def _of_a_lost_rank() -> Watchdog:
    watchdog = object.__new__(Watchdog)
    watchdog._device, watchdog._failure = torch.device("cuda", 0), "rank 1 was lost"
    watchdog._stopped = threading.Event()
    return watchdog


def test_after_a_lost_rank_the_thread_answers_until_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is freed next, and that waits for the device: for what only this thread ends."""
    watchdog, answered = _of_a_lost_rank(), []

    def synchronize(device: torch.device) -> None:
        time.sleep(0.1)
        answered.append(not watchdog._stopped.is_set())

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    watchdog.stop()
    assert answered == [True]
    assert watchdog._stopped.is_set()


@pytest.mark.parametrize("trouble", ["a collective that never ends", "a failed device", "the end of Python"])
def test_after_a_lost_rank_nobody_is_held_up_for_ever(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    watchdog, ended = _of_a_lost_rank(), threading.Event()

    def fails(*_: object) -> None:
        raise RuntimeError(trouble)

    monkeypatch.setattr(watchdog_module, "_RUN_OUT", 0.1)
    monkeypatch.setattr(torch.cuda, "synchronize", fails if trouble == "a failed device" else lambda _: ended.wait(30))
    if trouble == "the end of Python":
        monkeypatch.setattr(threading.Thread, "start", fails)
    begin = time.monotonic()
    watchdog.stop()
    assert time.monotonic() - begin < 10
    assert watchdog._stopped.is_set()
    ended.set()

"""The end of Python waits for gloo's threads to let go of tensors.

A collective on gloo runs in one of two threads of its process group, which lets go of the tensors a moment after
`wait()` has returned. Letting go of a tensor that Python knows takes the GIL, and where the interpreter is ending
already, asking for the GIL ends the thread inside a destructor: "terminate called without an active exception", SIGABRT
(torch 2.11 to 2.14 with Python up to 3.13). A program whose last collective comes right before its end meets this now
and then, on a busy machine more often. `dist.destroy_process_group()` joins the threads only if nobody else holds the
group, and a sharded model does.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from pathlib import Path
from typing import Final

_TASKS: Final = Path("/proc/self/task")
_THREAD_NAME: Final = "pt_gloo_runloop"

_PAUSE: Final = 0.01
"""Seconds; above Python's switch interval, 5 ms, in which a thread that waits for the GIL wakes at least once."""

_PATIENCE: Final = 5.0
"""Seconds. A thread that works for so long is in a collective that nobody waited for."""

_BLIND_PAUSE: Final = 0.1
"""Seconds, where the system does not show what threads do."""


def wait_for_gloo_at_exit() -> None:
    """Has the end of this process wait until gloo's threads are idle. Any number of calls are one."""
    atexit.unregister(let_gloo_go)
    atexit.register(let_gloo_go)


def let_gloo_go() -> None:
    """Gives the GIL away until no thread of gloo has anything left to do: 10 ms, more only if one is still at work.

    A thread is idle when it slept before a pause and sleeps after it, and did not wake in between. One that waits for
    the GIL would have.
    """
    if not _TASKS.is_dir():
        time.sleep(_BLIND_PAUSE)
        return
    before, until = _gloo_threads(), time.monotonic() + _PATIENCE
    while before and time.monotonic() < until:
        time.sleep(_PAUSE)
        now = _gloo_threads()
        if now == before and all("State:\tS (sleeping)" in lines for lines in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """By thread, the lines that tell its state and how often it was scheduled."""
    threads = {}
    for task in _TASKS.iterdir():
        # it may have ended
        with contextlib.suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            if lines[0] == f"Name:\t{_THREAD_NAME}":
                threads[task.name] = tuple(line for line in lines if line.startswith("State:") or "ctxt" in line)
    return threads

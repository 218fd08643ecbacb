"""How the processes of ranks start: afresh, or forked from templates that have imported torch and did nothing else.

Importing torch takes seconds, so pools that start often, because tests make ranks fail, share templates. There is one
for each rank number, and the ranks of a pool come from different ones: they hash differently and hold objects at other
addresses, as ranks that are started one by one do. Templates are for ranks on CPUs: what a GPU's libraries did before a
fork does not work after it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple

from gtp.errors import GTPStateError
from gtp.testing import rank_worker

_LOOK_AGAIN = 0.5  # seconds

__all__ = ["ForkedRank", "RankTemplates", "one_thread", "spawn_rank"]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Processes that start inside compute on one thread: OpenMP's pools of several ranks on few cores spin against each
    other. Libraries read that when they are loaded, hence in the parent's environment.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def spawn_rank(start: rank_worker.Start) -> tuple[SpawnProcess, Connection]:
    """A fresh process that runs `rank_worker.main(start, pipe)`, and this side of its pipe."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    name = f"gtp-rank{start.rank}of{start.world_size}"
    process = context.Process(target=rank_worker.main, args=(start, theirs), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, mine


class _Surroundings(NamedTuple):
    """What a fresh process would have from the one that starts it."""

    environment: dict[str, str]
    folder: str
    path: list[str]


class ForkedRank:
    """The parent's side of a forked rank: the part of `multiprocessing.Process` that a pool uses.

    Attributes:
        pid: Its process.
        exitcode: None while it runs; negative: the signal that ended it.
    """

    def __init__(self, template: _Template, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None
        self._template = template

    def is_alive(self) -> bool:
        self.join(0.0)
        return self.exitcode is None

    def kill(self) -> None:
        # it may just have ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the process has ended, at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._template.hear(left):
                return

    def close(self) -> None:
        """Nothing is held."""


class _Template:
    """The parent's side of one template."""

    def __init__(self, number: int, imports: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # no daemon: these may not have children. It ends when the pipe does
        self.process: SpawnProcess = context.Process(target=main, args=(theirs, imports), name=f"gtp-template{number}")
        self.process.start()
        theirs.close()
        self.ranks: dict[int, ForkedRank] = {}
        self.serials = itertools.count()
        self.pids: dict[int, int] = {}

    def fork(self, start: rank_worker.Start) -> tuple[ForkedRank, Connection]:
        serial = next(self.serials)
        mine, theirs = multiprocessing.Pipe()
        try:
            self.pipe.send((serial, start, _Surroundings(dict(os.environ), os.getcwd(), list(sys.path))))
            send_handle(self.pipe, theirs.fileno(), self.process.pid)
            theirs.close()
            while serial not in self.pids:
                if not self.process.is_alive():
                    raise GTPStateError(f"{self.process.name}, the process that forks ranks, has ended: run again")
                self.hear(1.0)
        except BaseException:
            # a time-out of a test, or Ctrl-C: what the template says next would be taken for something else
            self.process.kill()
            self.process.join()
            raise
        rank = self.ranks[serial] = ForkedRank(self, self.pids.pop(serial))
        return rank, mine

    def hear(self, timeout: float | None) -> bool:
        """One message: a rank's start or end. False when there was none in time."""
        try:
            if not self.pipe.poll(timeout):
                return False
            serial, pid, exitcode = self.pipe.recv()
        except (EOFError, OSError):
            # the template has ended, or was closed: its ranks end with it
            for rank in self.ranks.values():
                rank.exitcode = rank_worker.PARENT_GONE
            return True
        if exitcode is None:
            self.pids[serial] = pid
        elif serial in self.ranks:
            self.ranks.pop(serial).exitcode = exitcode
        return True


class RankTemplates:
    """Templates by rank number, started when first needed. `close` ends them, and ranks that were forked from them.

    Args:
        imports: Modules of torch that they import, too: those that `import torch` leaves for later.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._imports = imports
        self._templates: list[_Template] = []
        # multiprocessing waits for processes that are no daemons when Python ends; this runs before
        atexit.register(self.close)

    def prepare(self, world_size: int) -> None:
        """Starts the templates of so many ranks; they import while the caller goes on."""
        with one_thread():
            for number in range(world_size):
                if number == len(self._templates):
                    self._templates.append(_Template(number, self._imports))
                elif not self._templates[number].process.is_alive():
                    self._templates[number] = _Template(number, self._imports)

    def leave(self) -> None:
        """In a fork of the process that started them: they are that one's alone."""
        atexit.unregister(self.close)
        for template in self._templates:
            template.pipe.close()
        self._templates = []

    def fork(self, start: rank_worker.Start) -> tuple[ForkedRank, Connection]:
        """A rank that runs `rank_worker.main(start, pipe)` in this process's environment, and this side of its pipe."""
        self.prepare(start.rank + 1)
        return self._templates[start.rank].fork(start)

    def close(self) -> None:
        atexit.unregister(self.close)
        for template in self._templates:
            template.pipe.close()
        for template in self._templates:
            template.process.join()
        self._templates = []


def main(pipe: Connection, imports: Sequence[str]) -> None:
    """Entry point of a template: forks a rank per `(serial, start, surroundings)` and says when it began and ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    ranks: dict[int, ForkProcess] = {}
    while True:
        # A rank's sentinel is open in its children, too: one that outlives it must not hide that it has ended.
        ready = multiprocessing.connection.wait([pipe, *(rank.sentinel for rank in ranks.values())], _LOOK_AGAIN)
        if pipe in ready:
            try:
                serial, start, surroundings = pipe.recv()
            except (EOFError, ConnectionResetError):
                os._exit(0)  # ranks watch this process
            rank_pipe = Connection(recv_handle(pipe))
            name = f"gtp-rank{start.rank}of{start.world_size}"
            rank = context.Process(target=_rank, args=(start, surroundings, rank_pipe), name=name, daemon=True)
            rank.start()
            rank_pipe.close()
            ranks[serial] = rank
            pipe.send((serial, rank.pid, None))
        for serial in [serial for serial, rank in ranks.items() if rank.exitcode is not None]:
            rank = ranks.pop(serial)
            pipe.send((serial, rank.pid, rank.exitcode))
            rank.close()


def _rank(start: rank_worker.Start, surroundings: _Surroundings, pipe: Connection) -> None:
    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    sys.path[:] = surroundings.path
    rank_worker.main(start, pipe)

"""Tests that need no ranks run in a second process, beside the others.

One core of two waits a quarter of the time that multi-rank tests take. So a session of many tests forks when it has
collected them. The second process runs tests without ranks, the last one first, at low priority. The first runs those
with ranks, then those without from the first one on until both meet, and at the end the tests of programs
(tests/processes.py). Between its files it shows what the second has reported, each test under its own name, as if it
had run here: to `-x`, `--lf`, `--durations` or a report in a file there is no difference.

Sessions of fewer tests stay in one process and in the order of the files, and so do those in which a test may talk to
the terminal (`-s`, `--pdb`).
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.processes import MARK, NICENESS

FEWEST = 200
"""Tests without ranks in a session that starts a second process."""

PATIENCE = 280.0
"""Seconds that a test may take in the second process: at low priority, tests take longer."""


def run(session: pytest.Session, *, after_fork: Callable[[], None] = lambda: None, fewest: int = FEWEST) -> bool | None:
    """Runs the tests of a session in two processes; or does nothing and answers None: pytest is to run them.

    Args:
        after_fork: Called in the second process before its tests: lets go of what is the first's alone.
        fewest: Tests without ranks that it is worth it for.

    Raises:
        pytest.Session.Failed: as many tests failed as may.
        pytest.Session.Interrupted: the session was told to stop.
    """
    options: Any = session.config.option
    may_talk = options.capture == "no" or options.usepdb or options.trace or options.setupshow
    with_ranks, without, of_programs = _by_kind(session.items)
    if options.collectonly or session.testsfailed or may_talk or len(without) < fewest:
        return None
    session.items = [*with_ranks, *without, *of_programs]
    with SecondProcess(session, without, after_fork) as second:
        for item, following in _with_next(itertools.chain(with_ranks, second.left_over(), of_programs)):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            _stop_if_told(session)
            if following is None or following.path != item.path:
                second.show()
        second.show_all()
    return True


class SecondProcess:
    """Runs tests, the last one first, until it comes to one that the first process has taken.

    What both take and what the second reports is in files: a pipe that nobody empties while the first process runs a
    long test would stop the second.

    Args:
        session: Has collected its tests, and run none.
        items: Those that the second process may run.
        after_fork: Called in the second process first.
    """

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Item], after_fork: Callable[[], None]) -> None:
        self._session = session
        self._config: Any = session.config
        self._items = items
        self._first_has = 0
        """As many of the items, from the first one on."""
        self._shown = len(items)
        """From there on."""
        self._exit_code: int | None = None
        # the folder of what tests write is made before the fork: both processes use it
        self._temporary = tempfile.TemporaryDirectory(dir=self._config._tmp_path_factory.getbasetemp())
        self._folder = Path(self._temporary.name)
        capture = self._config.pluginmanager.getplugin("capturemanager")
        # it writes to files, of which each process needs its own
        capture.stop_global_capturing()
        with warnings.catch_warnings():
            # numpy's OpenBLAS has a thread, which it ends before a fork and starts again when it needs one
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            self._run_and_exit(capture, after_fork)
        # a Ctrl-C is for the first process alone
        os.setpgid(self._pid, self._pid)
        capture.start_global_capturing()
        capture.suspend_global_capture()

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended():
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._temporary.cleanup()

    def left_over(self) -> Iterator[pytest.Item]:
        """Takes tests for the first process, from the first one on to where the second has come."""
        while self._first_has < len(self._items) and self._take(self._first_has):
            self._first_has += 1
            yield self._items[self._first_has - 1]

    def show(self) -> bool:
        """Hands pytest what the second process has reported since the last time, and says whether there was any."""
        before = self._shown
        while self._shown and (reports := self._folder / f"{self._shown - 1}.reports").exists():
            self._shown -= 1
            self._hand_on(self._items[self._shown], *pickle.loads(reports.read_bytes()))
        return self._shown != before

    def show_all(self) -> None:
        """The same, after the second process has run all that it took. What it does not report has failed."""
        deadline = time.monotonic() + PATIENCE + 20
        while not self._has_ended():
            if self.show():
                deadline = time.monotonic() + PATIENCE + 20
            elif time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
            time.sleep(0.02)
        self.show()
        for item in reversed(self._items[self._first_has : self._shown]):
            printed = (self._folder / "printed").read_text(errors="replace")[-10_000:]
            text = f"the second process ended with exit code {self._exit_code} here or in the test before\n{printed}"
            self._hand_on(item, [pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")], [])

    def _take(self, index: int) -> bool:
        """Whether this process is the one that runs the test."""
        try:
            (self._folder / f"{index}.taken").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _has_ended(self) -> bool:
        if self._exit_code is None and (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            self._exit_code = os.waitstatus_to_exitcode(ended[1])
        return self._exit_code is not None

    def _hand_on(self, item: pytest.Item, reports: list[pytest.TestReport], warned: list[dict[str, Any]]) -> None:
        for warning in warned:
            item.ihook.pytest_warning_recorded.call_historic(kwargs=warning)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        _stop_if_told(self._session)

    def _run_and_exit(self, capture: Any, after_fork: Callable[[], None]) -> NoReturn:
        """All that the second process does."""
        first = os.getppid()
        code = 1
        try:
            os.nice(NICENESS)
            after_fork()
            _print_to(self._folder / "printed")
            capture.start_global_capturing()
            capture.suspend_global_capture()
            said = _Said()
            self._config.pluginmanager.register(said)
            self._session.items = list(self._items)  # none of them has a program to start
            taken = itertools.takewhile(self._take, reversed(range(len(self._items))))
            for index, following in _with_next(taken):
                said.clear()
                item = self._items[index]
                if item.get_closest_marker("timeout") is None:
                    item.add_marker(pytest.mark.timeout(PATIENCE))
                nextitem = None if following is None else self._items[following]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
                # complete as soon as it is there
                part = self._folder / "part"
                part.write_bytes(pickle.dumps((said.reports, said.warned)))
                part.rename(self._folder / f"{index}.reports")
                if os.getppid() != first or self._session.shouldfail or self._session.shouldstop:
                    break
            code = 0
        except BaseException:  # noqa: BLE001 - the end of a process: nobody else would print it
            traceback.print_exc()
        finally:
            os._exit(code)


class _Said:
    """A plugin that keeps what pytest is told about a test."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.reports: list[pytest.TestReport] = []
        self.warned: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        self.warned.append({"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location})


def _by_kind(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item], list[pytest.Item]]:
    """Those with ranks, those without, and those of programs, each in their order."""
    with_ranks, without, of_programs = [], [], []
    for item in items:
        if item.get_closest_marker(MARK) is not None:
            of_programs.append(item)
        else:
            (with_ranks if "ranks" in getattr(item, "fixturenames", ()) else without).append(item)
    return with_ranks, without, of_programs


def _with_next[T](items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Each with the one that comes next; the last with None."""
    return itertools.pairwise(itertools.chain(items, [None]))


def _stop_if_told(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _print_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)

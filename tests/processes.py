"""Programs that tests look at: each a process of its own, which runs beside the other tests.

    @pytest.mark.process("-m", "benchmarks.step", "--out", "{folder}/step.json")
    def test_the_file_says_how_many_ranks(process):
        assert json.loads((process.folder / "step.json").read_text())["ranks"] == 2

The mark has Python's arguments; `ranks=2` runs them under torchrun; `{folder}` is an empty folder; keyword `env` has
more environment. The fixture `process` is what it did, once it has ended with exit code 0; any other end fails the
test.

One core of two waits a quarter of the time that multi-rank tests take, and importing torch is most of what such a
program does. So tests with the mark come last, and their programs run one after another from the start of the session,
at low priority: little disturbs the other tests, and when a program's own test comes, it has usually ended.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARK = "process"
NICENESS = 10
"""Above that of the tests."""

PATIENCE = 280.0
"""Seconds that a test waits. Those before its turn do not count: other tests may leave its program no time."""

AT_MOST = 1500.0
"""Seconds that a program may take beside the other tests. One that hangs must not keep the next from its turn."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program that ended well."""

    code: int
    stdout: str
    folder: Path


class Processes:
    """Runs the programs of marked tests, one at a time, in the tests' order.

    Args:
        items: Tests; those without the mark have no program.
        folder: Where programs leave what they print and write.
    """

    def __init__(self, items: Iterable[pytest.Item], folder: Path) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # before any test patches it
        self._running: subprocess.Popen[bytes] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gtp-test-processes")
        self._ends: dict[str, concurrent.futures.Future[int]] = {}
        self._folders: dict[str, Path] = {}
        for item in items:
            if (mark := item.get_closest_marker(MARK)) is not None:
                own = self._folders[item.nodeid] = folder / str(len(self._folders))
                self._ends[item.nodeid] = self._thread.submit(self._run, mark, own)

    def ended(self, item: pytest.Item) -> Ended:
        """What the program of this test did.

        Raises:
            AssertionError: its exit code is not 0; with what it printed.
            TimeoutError: it has not ended.
        """
        folder = self._folders[item.nodeid]
        try:
            code = self._ends[item.nodeid].result(PATIENCE)
        except concurrent.futures.TimeoutError:
            if self._running is not None and self._ends[item.nodeid].running():
                os.killpg(self._running.pid, signal.SIGKILL)  # the next one's turn
            raise
        stdout, stderr = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        assert code == 0, f"exit code {code}\n{stdout[-10_000:]}\n{stderr[-10_000:]}"
        return Ended(code, stdout, folder)

    def close(self) -> None:
        """Ends what runs, and starts no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        begun = [end for end in self._ends.values() if not end.cancelled()]
        # torchrun ends its ranks on SIGTERM
        for kind in (signal.SIGTERM, signal.SIGKILL):
            if self._running is not None and self._running.poll() is None:
                os.killpg(self._running.pid, kind)
            if not concurrent.futures.wait(begun, 10).not_done:
                return

    def _run(self, mark: pytest.Mark, folder: Path) -> int:
        folder.mkdir(parents=True)
        command = [sys.executable]
        if "ranks" in mark.kwargs:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mark.kwargs["ranks"])]
        command += [argument.replace("{folder}", str(folder)) for argument in mark.args]
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            self._running = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._environment, **mark.kwargs.get("env", {})},
                stdout=stdout,
                stderr=stderr,
                process_group=0,
            )
            # what it starts inherits that
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
            os.setpriority(os.PRIO_PROCESS, self._running.pid, min(niceness, 19))
            try:
                return self._running.wait(AT_MOST)
            except subprocess.TimeoutExpired:
                os.killpg(self._running.pid, signal.SIGKILL)
                return self._running.wait()

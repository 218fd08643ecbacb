"""Programs of tests run in the tests' order, with what their marks say; a failing one shows what it printed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import NICENESS, Ended, Processes


def item(name: str, code: str, **options: Any) -> Any:
    mark = SimpleNamespace(args=("-c", code, "{folder}/file"), kwargs=options)
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda kind: mark if kind == "process" else None)


def test_output_folder_environment_and_priority(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; time.sleep(0.5); print(os.environ['COLOR'], os.environ['OMP_NUM_THREADS'], os.nice(0)); "
        "open(sys.argv[1], 'w')"
    )
    test = item("a", code, env={"COLOR": "red"})
    processes = Processes([test], tmp_path)
    ended = processes.ended(test)
    assert ended == Ended(0, f"red 1 {min(os.nice(0) + NICENESS, 19)}\n", tmp_path / "0")
    assert (ended.folder / "file").exists()
    processes.close()


def test_a_program_that_hangs_fails_its_own_test_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.processes.PATIENCE", 2.0)
    tests = [item("a", "import time; time.sleep(600)"), item("b", "print('next')")]
    processes = Processes(tests, tmp_path)
    with pytest.raises(TimeoutError):
        processes.ended(tests[0])
    monkeypatch.undo()
    assert processes.ended(tests[1]).stdout == "next\n"
    processes.close()


def test_another_exit_code_fails_with_what_was_printed(tmp_path: Path) -> None:
    tests = [item("a", "print('before'); raise SystemExit('after')"), item("b", "print('next')")]
    processes = Processes(tests, tmp_path)
    with pytest.raises(AssertionError, match="exit code 1\nbefore\n\nafter"):
        processes.ended(tests[0])
    assert processes.ended(tests[1]).stdout == "next\n"
    processes.close()


def test_what_still_runs_ends_with_the_session_and_no_more_starts(tmp_path: Path) -> None:
    tests = [item("a", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"), item("b", "")]
    processes = Processes(tests, tmp_path)
    output = tmp_path / "0" / "stdout"
    while not output.exists() or not output.read_text().endswith("\n"):
        time.sleep(0.01)
    processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(output.read_text()), 0)
    assert not (tmp_path / "1").exists()

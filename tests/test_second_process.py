"""A session in two processes shows what one process would: every test once, with its outcome, its output, its error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import os, pathlib, time, pytest
from tests import second_process

@pytest.fixture
def ranks():
    pass

@pytest.fixture
def in_first():
    return os.environ["FIRST"] == str(os.getpid())

@pytest.fixture
def come():
    return lambda name: pathlib.Path(name).touch()

@pytest.fixture
def wait_for():
    def wait(name):
        while not pathlib.Path(name).exists():
            time.sleep(0.01)
    return wait

def pytest_configure(config):
    os.environ["FIRST"] = str(os.getpid())
    config.addinivalue_line("markers", "process: of a program")

def pytest_runtestloop(session):
    return second_process.run(session, fewest=2)
"""


def session(folder: Path, code: str, *arguments: str) -> tuple[str, list[str]]:
    """What pytest prints over a file of tests, and the names of the tests in the order in which it shows them."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(code)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "-v",
        "-rA",
        *arguments,
    ]
    # importing the plugins of other packages takes longer than the tests
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=250, check=False)
    output = ended.stdout + ended.stderr
    progress = output.partition("short test summary")[0].partition("= FAILURES")[0]
    return output, re.findall(r"^test_it.py::test_(\S+) [A-Z]+", progress, re.MULTILINE)


def test_every_test_is_shown_as_if_it_had_run_in_the_first(tmp_path: Path) -> None:
    code = """
import pytest, warnings

@pytest.fixture(scope="module")
def made():
    print("set up")
    yield 3
    print("torn down")

def test_next_in_the_first():
    pass

@pytest.mark.parametrize("value", [3, 4])
def test_value(made, value, in_first, come):
    assert not in_first
    print("looks at", value)
    warnings.warn(f"value {value}")
    come(str(value))
    assert made == value

@pytest.mark.xfail
def test_wrong(in_first):
    assert in_first

def test_with_ranks(ranks, in_first, wait_for):
    assert in_first
    wait_for("3")  # the last of the second process: it runs beside this

def test_skipped():
    pytest.skip("why not")

def test_teardown(request, tmp_path):
    request.addfinalizer(lambda: 1 / 0)
"""
    output, names = session(tmp_path, code)
    assert "1 failed, 4 passed, 1 skipped, 1 xfailed, 2 warnings, 1 error in" in output
    assert names == "with_ranks next_in_the_first teardown teardown skipped wrong value[4] value[3]".split()
    for text in (
        "FAILED test_it.py::test_value[4] - assert 3 == 4",
        "PASSED test_it.py::test_value[3]",
        "ERROR test_it.py::test_teardown - ZeroDivisionError: division by zero",
        ": why not",
        "UserWarning: value 3",
        "looks at 4",
    ):
        assert text in output
    # the module's fixture lives across its tests
    assert (output.count("set up\n"), output.count("torn down\n")) == (1, 1)


def test_the_first_takes_what_the_second_has_not_come_to(tmp_path: Path) -> None:
    code = """
def test_one(in_first, come, wait_for):
    assert in_first
    wait_for("four")
    come("one")

def test_two(in_first, come):
    assert in_first
    come("two")

def test_three(wait_for):
    wait_for("two")

def test_four(in_first, come, wait_for):
    assert not in_first
    come("four")
    wait_for("one")
"""
    output, names = session(tmp_path, code)
    assert "4 passed in" in output
    assert names == ["one", "two", "four", "three"]


def test_a_failure_there_stops_the_session_where_it_may(tmp_path: Path) -> None:
    code = """
def test_ranks(ranks, wait_for):
    wait_for("three")

def test_one():
    pass

def test_two(come, wait_for):
    pass

def test_three(come):
    come("three")
    raise ValueError("there")

def test_four():
    pass
"""
    output, names = session(tmp_path, code, "-x")
    assert "ValueError: there" in output
    assert "stopping after 1 failures" in output
    assert names == ["ranks", "one", "four", "three"]


def test_the_end_of_the_second_process_is_a_failure_of_its_test(tmp_path: Path) -> None:
    code = """
import os

def test_ranks(ranks, wait_for):
    wait_for("three")

def test_one():
    pass

def test_two():
    pass

def test_three(come):
    come("three")
    os.kill(os.getpid(), 9)

def test_four():
    pass
"""
    output, names = session(tmp_path, code)
    # its next test was already taken
    assert "2 failed, 3 passed in" in output
    assert names == ["ranks", "one", "four", "three", "two"]
    assert "FAILED test_it.py::test_three - the second process ended with exit code -9" in output


def test_one_process_where_tests_may_talk_to_the_terminal(tmp_path: Path) -> None:
    code = """
def test_one(in_first):
    assert in_first

def test_ranks(ranks):
    pass

def test_two(in_first):
    assert in_first
"""
    output, names = session(tmp_path, code, "-s")
    assert "3 passed in" in output
    assert names == ["one", "ranks", "two"]

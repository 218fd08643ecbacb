"""Real ranks for tests: a pool of processes that live across tests, each a rank of one gloo process group.

Importing torch in fresh processes for every test is what makes multi-rank suites slow, so processes stay:

    from gtp.testing import ranks

    def mean_of_ranks(scale):                         # a module-level function: it is pickled by reference
        x = torch.full((2,), scale * ranks.rank())
        dist.all_reduce(x)
        return x / ranks.world_size()

    def test_mean(ranks):                             # the fixture of tests/conftest.py
        assert ranks(2).run(mean_of_ranks, 3.0)[1].tolist() == [1.5, 1.5]

Inside a rank: `torch.distributed` is initialised over all ranks of the pool, torch and each gloo group run on one
thread, `torch.manual_seed(0)` was just called, and `rank()`, `world_size()`, `subgroup((0, 2))` of this module work.
Garbage is collected after each function; objects that were alive when modules had been imported are left out of that
from then on (`gc.freeze`). Results come back pickled; tensors arrive on the CPU, detached. Ranks on a machine with GPUs
may share them: the test picks the device; gloo serves CUDA tensors too.

A failure on any rank raises `RankFailure` with each failing rank's traceback; ranks that have not answered a few
seconds later (most often: they wait in a collective for the failed one) are shown with their Python stacks. When no
rank fails but one does not answer in time, `RankTimeout` shows every such rank's stacks. Either way the pool's
processes are killed, since their process group may be out of step, and the next `run` starts fresh ones.

Processes start afresh, or are forked from templates that have imported torch (`RankTemplates` of
`gtp.testing.rank_processes`); the tests here take templates, unless there is a GPU.

`GTP_TEST_RANK_LOG=1` (with `pytest -s`) lets ranks print to the terminal as they go; otherwise what they print is shown
when they fail.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing.connection
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from gtp.errors import GTPError, GTPValueError
from gtp.testing import rank_worker
from gtp.testing.rank_processes import ForkedRank, RankTemplates, one_thread, spawn_rank

_LOOK_AGAIN = 0.5  # seconds, until processes that have said nothing are looked at

__all__ = ["RankFailure", "RankPool", "RankPools", "RankTimeout", "rank", "subgroup", "world_size"]


class RankFailure(GTPError, RuntimeError):
    """A function failed on at least one rank.

    Attributes:
        failures: What went wrong by rank, first failure first: a traceback, or how the process ended.
        stacks: Python stacks of the ranks that had not answered, by rank.
        outputs: The last lines that each of these ranks printed, by rank.
    """

    def __init__(self, title: str, failures: dict[int, str], stacks: dict[int, str], outputs: dict[int, str]) -> None:
        self.failures = failures
        self.stacks = stacks
        self.outputs = outputs
        by_text: dict[str, list[int]] = collections.defaultdict(list)
        for r, text in failures.items():
            by_text[f"failed:\n{text.rstrip()}"].append(r)
        for r, text in stacks.items():
            by_text[f"did not answer. Its stacks, innermost call first:\n{text.rstrip()}"].append(r)
        for r, text in outputs.items():
            by_text[f"printed last:\n{text.rstrip()}"].append(r)
        parts = [f"--- rank {', '.join(map(str, owners))} {text}" for text, owners in by_text.items()]
        super().__init__("\n\n".join([title, *parts]))


class RankTimeout(RankFailure):
    """No rank failed, but at least one did not answer in time. `stacks` says where each of them was."""


def rank() -> int:
    """This rank in the pool. Inside a rank only.

    Raises:
        GTPStateError: outside of a rank.
    """
    return rank_worker.current().rank


def world_size() -> int:
    """Number of ranks of the pool. Inside a rank only.

    Raises:
        GTPStateError: outside of a rank.
    """
    return rank_worker.current().world_size


def subgroup(members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of these ranks, made at the first call and kept by the rank process across tests.

    Collective over all ranks of the pool, members or not, in the same order, like `torch.distributed.new_group`.

    Args:
        members: Ascending ranks of the pool.

    Returns:
        The group, or None on ranks outside of it.

    Raises:
        GTPStateError: outside of a rank.
        GTPValueError: ranks that are unsorted, repeated or not of this pool.
    """
    return rank_worker.current().subgroup(members)


@dataclasses.dataclass(eq=False)
class _Rank:
    """The parent's side of one rank process."""

    process: SpawnProcess | ForkedRank
    pipe: Connection
    stack_file: Path
    output_file: Path | None
    output_start: int = 0

    def begin(self) -> None:
        """From here on, output belongs to the next failure."""
        if self.output_file is not None and self.output_file.exists():
            self.output_start = self.output_file.stat().st_size

    def output(self, lines: int = 40) -> str:
        if self.output_file is None or not self.output_file.exists():
            return ""
        text = self.output_file.read_bytes()[self.output_start :].decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def ask_for_stacks(self) -> None:
        self.stack_file.write_bytes(b"")
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, rank_worker.STACK_SIGNAL)

    def stacks(self) -> str:
        return self.stack_file.read_text(errors="replace")


class RankPool:
    """`world_size` processes that are ranks of one process group and run one function after another.

    Processes start at the first `run`. A context manager: leaving it closes the pool.

    Args:
        world_size: Number of ranks, at least 1.
        backend: Given to `torch.distributed.init_process_group`. With NCCL in it, rank r takes CUDA device r.
        grace: Seconds that the other ranks still get when one has failed.
        start_timeout: Seconds that the processes may take to start, import torch and find each other.
        templates: Forks the processes, which then need not import torch; None: each is started afresh.

    Raises:
        GTPValueError: `world_size` below 1.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        grace: float = 3.0,
        start_timeout: float = 180.0,
        templates: RankTemplates | None = None,
    ) -> None:
        if world_size < 1:
            raise GTPValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.backend = backend
        self.grace = grace
        self.start_timeout = start_timeout
        self.templates = templates
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run[T](
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = 60.0,
        per_rank_args: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[T]:
        """Runs `fn(*args, *per_rank_args[rank])` on every rank.

        Args:
            fn: A function that can be imported: defined at the top level of a module.
            args: Given to each rank; picklable.
            timeout: Seconds until every rank must have answered. Starting the processes does not count.
            per_rank_args: One tuple per rank, appended to `args`.

        Returns:
            What each rank returned, by rank.

        Raises:
            GTPValueError: `fn` cannot be pickled by reference, or `per_rank_args` has the wrong length.
            RankFailure: a rank raised or its process ended.
            RankTimeout: a rank did not answer in time.
        """
        if per_rank_args is not None and len(per_rank_args) != self.world_size:
            raise GTPValueError(f"per_rank_args needs {self.world_size} tuples, one per rank, got {len(per_rank_args)}")
        extra = per_rank_args if per_rank_args is not None else [()] * self.world_size
        messages = [_pack(fn, (*args, *more)) for more in extra]
        # whatever ends this early (a test's own timeout, Ctrl-C) leaves ranks in the middle of something
        with self._killed_unless_done():
            if not all(r.process.is_alive() for r in self._ranks) or not self._ranks:
                self._start()
            for r, message in zip(self._ranks, messages, strict=True):
                r.begin()
                _send(r.pipe, message)
            return self._collect(f"{fn.__module__}.{fn.__qualname__}", timeout)

    def close(self) -> None:
        """Ends the processes. The next `run` starts new ones."""
        for r in self._ranks:
            r.pipe.close()
        deadline = time.monotonic() + 2.0
        for r in self._ranks:
            r.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _killed_unless_done(self) -> Iterator[None]:
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self._kill()

    def _start(self) -> None:
        self._kill()
        # the parent's store gives a free port without a race, and outlives any rank
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="gtp-ranks-")
        folder = Path(self._folder.name)
        live = os.environ.get("GTP_TEST_RANK_LOG") == "1"
        with one_thread():
            if self.templates is not None:
                self.templates.prepare(self.world_size)
            for r in range(self.world_size):
                start = rank_worker.Start(
                    rank=r,
                    world_size=self.world_size,
                    backend=self.backend,
                    store_port=self._store.port,
                    stack_file=folder / f"stacks{r}.txt",
                    output_file=None if live else folder / f"output{r}.txt",
                )
                process, pipe = spawn_rank(start) if self.templates is None else self.templates.fork(start)
                self._ranks.append(_Rank(process, pipe, start.stack_file, start.output_file))
        self._collect("the start of the rank processes", self.start_timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """One answer of every rank, or the exception that says who failed and where the others are."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._ranks))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            pipes = {r.pipe: i for i, r in waiting.items()}
            answered = multiprocessing.connection.wait(list(pipes), min(left, _LOOK_AGAIN))
            # the pipe of one that has ended stays open where a child of its own outlives it
            for ready in answered or [r.pipe for r in waiting.values() if not r.process.is_alive()]:
                i = pipes[ready]  # type: ignore[index]
                kind, value = _receive(waiting.pop(i))
                (results if kind in ("ok", "ready") else failures)[i] = value
                if failures:
                    deadline = min(deadline, time.monotonic() + self.grace)
        if not waiting and not failures:
            return [results[i] for i in range(self.world_size)]
        silent = sorted(waiting)
        outputs = {i: text for i in [*failures, *silent] if (text := self._ranks[i].output())}
        stacks = self._stacks(silent)
        if failures:
            who = "rank" if len(failures) == 1 else "ranks"
            title = f"{what} failed on {who} {', '.join(map(str, failures))} of {self.world_size}"
            raise RankFailure(title, failures, stacks, outputs)
        who = "rank" if len(silent) == 1 else "ranks"
        title = (
            f"{what} did not end within {timeout:g} s on {who} {', '.join(map(str, silent))} of {self.world_size}"
            + (f" (rank {', '.join(map(str, sorted(results)))} did)" if results else "")
        )
        raise RankTimeout(title, failures, stacks, outputs)

    def _stacks(self, indices: list[int]) -> dict[int, str]:
        """Python stacks of all threads of these ranks. The signal handler writes them without needing the GIL."""
        for i in indices:
            self._ranks[i].ask_for_stacks()
        found = dict.fromkeys(indices, "")
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            latest = {i: self._ranks[i].stacks() for i in indices}
            # complete when they have stopped growing
            if latest == found and all(latest.values()):
                break
            found = latest
        return {i: text or "(the process did not answer the signal)" for i, text in found.items()}

    def _kill(self) -> None:
        for r in self._ranks:
            r.pipe.close()
            if r.process.is_alive():
                r.process.kill()
        for r in self._ranks:
            r.process.join()
            r.process.close()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RankPools:
    """Pools by world size and backend, kept for reuse; the least recently used go when there are too many ranks.

    Args:
        max_ranks: Rank processes that may be alive at once over all pools. A pool larger than that lives alone.
        templates: For all pools; closed with them.
    """

    def __init__(self, max_ranks: int = 10, *, templates: RankTemplates | None = None) -> None:
        self.max_ranks = max_ranks
        self.templates = templates
        self._pools: dict[tuple[int, str], RankPool] = {}

    def __call__(self, world_size: int, *, backend: str = "gloo") -> RankPool:
        """The pool of this size, with its processes if it was used lately."""
        key = (world_size, backend)
        pool = self._pools.pop(key, None) or RankPool(world_size, backend=backend, templates=self.templates)
        while self._pools and sum(size for size, _ in self._pools) + world_size > self.max_ranks:
            self._pools.pop(next(iter(self._pools))).close()
        # a dict keeps the order of insertion: the last is the most recently used
        self._pools[key] = pool
        return pool

    def close(self) -> None:
        """Ends all processes."""
        while self._pools:
            self._pools.popitem()[1].close()
        if self.templates is not None:
            self.templates.close()


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise GTPValueError(
            f"fn must be a function at the top level of a module, which every rank can import; {name} is not: "
            f"define it outside of the test and pass what it needs as arguments ({error})"
        ) from error
    return rank_worker.dumps((fn, args))


def _send(pipe: Connection, message: bytes) -> None:
    try:
        pipe.send_bytes(message)
    except OSError:
        # the process is gone: `_collect` reads the end of the pipe and reports how it ended
        return


def _receive(source: _Rank) -> tuple[str, Any]:
    try:
        if not source.pipe.poll():
            raise EOFError
        answer = source.pipe.recv_bytes()
    except (EOFError, OSError):
        source.process.join(5.0)
        code = source.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return "error", f"the process ended with {how}"
    kind, value = pickle.loads(answer)
    return kind, value

"""What runs inside one rank process of a `gtp.testing.ranks.RankPool`: start, take a function, run it, answer.

A rank's state (its subgroups) hangs off one `Worker`, which functions under test reach through the helpers of
`gtp.testing.ranks`. Nothing here is called by users.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, GTPValueError

STACK_SIGNAL: Final = signal.SIGUSR1
"""A rank that receives it appends the Python stack of each of its threads to its stack file."""

PARENT_GONE: Final = 1
"""Exit code of a rank whose parent ended."""

CURRENT: Final[contextvars.ContextVar[Worker]] = contextvars.ContextVar("gtp_rank_worker")


@dataclasses.dataclass(frozen=True)
class Start:
    """What a rank process needs to join its pool."""

    rank: int
    world_size: int
    backend: str
    store_port: int
    stack_file: Path
    output_file: Path | None
    """Where stdout and stderr go; None leaves them alone."""


@dataclasses.dataclass(eq=False)
class Worker:
    """One rank process's own state."""

    rank: int
    world_size: int
    subgroups: dict[tuple[int, ...], dist.ProcessGroup | None] = dataclasses.field(default_factory=dict)
    modules: int = 0
    """How many were imported when garbage collection was last told to leave them alone."""

    def freeze_imports(self) -> None:
        """What imports leave is not looked through again: a collection over all objects of torch and Megatron takes a
        fifth of a second, more than most functions run."""
        if len(sys.modules) != self.modules:
            gc.collect()
            gc.freeze()
            self.modules = len(sys.modules)

    def subgroup(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        if not members or sorted(set(members)) != list(members) or not 0 <= members[0] <= members[-1] < self.world_size:
            raise GTPValueError(
                f"subgroup({members}): give ascending ranks between 0 and {self.world_size - 1}, each once"
            )
        if members not in self.subgroups:
            group = dist.new_group(list(members))
            self.subgroups[members] = group if self.rank in members else None
        return self.subgroups[members]


def current() -> Worker:
    try:
        return CURRENT.get()
    except LookupError:
        raise GTPStateError(
            "not inside a rank: call this in the main thread of a function given to RankPool.run"
        ) from None


def dumps(obj: Any) -> bytes:
    """Pickles by value: tensors travel as CPU bytes, never as shared memory, file descriptors or CUDA handles."""
    buffer = io.BytesIO()
    _CpuPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


class _CpuPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # only plain tensors: a subclass says itself how it pickles
        if type(obj) is torch.Tensor and (obj.device.type != "cpu" or obj.grad_fn is not None):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def main(start: Start, pipe: Connection) -> None:
    """Entry point of a rank process: sends ("ready", None), then one ("ok", result) or ("error", text) per function."""
    if start.output_file is not None:
        _redirect_output(start.output_file)
    # a Ctrl-C in the terminal reaches the whole process group; the parent decides when ranks end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(2)  # what ends a rank in native code shows where Python was
    with start.stack_file.open("a") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        _end_with_parent()
        worker = _join(start)
        pipe.send_bytes(pickle.dumps(("ready", None)))
        # an end of the pipe is the normal end of a rank
        while (message := _receive(pipe)) is not None:
            answer = _answer(worker, message)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(answer)
    # no destroy_process_group: it may wait for ranks that are already gone
    os._exit(0)


def _receive(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return None


def _answer(worker: Worker, message: bytes) -> bytes:
    """Runs one pickled `(fn, args)`; any exception, even SystemExit, becomes text for the parent."""
    token = CURRENT.set(worker)
    try:
        fn, args = pickle.loads(message)
        worker.freeze_imports()
        torch.manual_seed(0)
        return dumps(("ok", fn(*args)))
    except BaseException as error:  # noqa: BLE001 - the boundary of a process: the parent raises it
        # the first frame is this function's: it says nothing to the reader
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
        return pickle.dumps(("error", text))
    finally:
        CURRENT.reset(token)
        gc.collect()


def _redirect_output(path: Path) -> None:
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _end_with_parent() -> None:
    """Ends this process when the parent is gone, even if the main thread is inside a collective."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(PARENT_GONE)

    threading.Thread(target=watch, name="gtp-parent-watch", daemon=True).start()


def _join(start: Start) -> Worker:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(start.rank), LOCAL_RANK=str(start.rank), WORLD_SIZE=str(start.world_size))
    if sys.platform == "linux":
        # gloo otherwise resolves the host's name, which sandboxes and laptops off-line cannot
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "nccl" in start.backend:
        torch.cuda.set_device(start.rank)
    _set_up_gloo()
    store = dist.TCPStore("127.0.0.1", start.store_port, is_master=False)
    dist.init_process_group(
        start.backend,
        store=store,
        rank=start.rank,
        world_size=start.world_size,
        # far above any test: the pool's own timeout shows stacks, this one would not
        timeout=datetime.timedelta(minutes=30),
    )
    return Worker(start.rank, start.world_size)


def _set_up_gloo() -> None:
    """All gloo groups of this process send through one loop, and each runs its collectives in one thread.

    Otherwise each group has a loop of its own: a thread that wakes a hundred times a second for as long as the process
    lives, also when nobody uses the group any more. Those of seventy groups, as tests leave them behind, take a tenth
    of a core. And each has two threads for collectives, which damage the heap where somebody coalesces (Megatron does):
    see [Note: nothing is coalesced on gloo] in gtp/runtime/process_group.py.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces is None:
        devices = [gloo.create_default_device()]
    else:
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]

    construct = gloo.__init__

    def with_our_options(
        group: Any, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **more: Any
    ) -> None:
        # newer torches name what they do not want: enable_reconfigure=False
        if any(more.values()):
            construct(group, store, rank, size, timeout=timeout, **more)
            return
        options = gloo._Options()
        options._devices = devices
        options._threads = 1
        options._timeout = timeout
        construct(group, store, rank, size, options)

    # not a class in its place: torch asks groups that come back from C++ for theirs
    gloo.__init__ = with_our_options

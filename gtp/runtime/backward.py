"""`BackwardTracker`: is a backward running, and when does the outermost one end."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread is inside a node of a running backward (a recomputed forward counts)."""
    return torch._C._current_graph_task_id() != -1


class _EndOfTask:
    """Queued as a final callback of one graph task, and referenced by nothing else.

    The engine drops it when the task is destroyed. So its death without a call means that the backward raised.
    """

    __slots__ = ("__weakref__", "_ended", "_task")

    def __init__(self, task: int, ended: Callable[[int], None]) -> None:
        self._task = task
        self._ended = ended

    def __call__(self) -> None:
        self._ended(self._task)


class BackwardTracker:
    """Follows the graph tasks in which gtp has work.

    [Note: nested backwards] Reentrant activation checkpointing runs an inner backward inside a node of the outer one.
    Its recomputed forward comes through gtp first, within the outer task, so the outer task is always known before the
    inner one, and the end of a task is the end of the backward when no other known task is left.

    Args:
        on_end: Called once, inside the outermost `backward()`, after its last node.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._tasks: dict[int, weakref.ref[_EndOfTask]] = {}

    def enter(self) -> None:
        """To be called from every piece of work inside a backward, before it starts."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks or task == -1:
            return
        ended = _EndOfTask(task, self._ended)
        self._tasks[task] = weakref.ref(ended)
        Variable._execution_engine.queue_callback(ended)

    @property
    def pending(self) -> bool:
        """Whether a backward was entered and has not ended. Outside of one, that means that it raised."""
        return bool(self._tasks)

    @property
    def failed(self) -> bool:
        """Whether a backward that was entered has died without ending."""
        return any(ref() is None for ref in self._tasks.values())

    def forget(self) -> None:
        """Drops all tasks, after a failure was cleaned up."""
        self._tasks.clear()

    def _ended(self, task: int) -> None:
        self._tasks.pop(task, None)
        if all(ref() is None for ref in self._tasks.values()):
            self._tasks.clear()
            self._on_end()

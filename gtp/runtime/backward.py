"""`BackwardTracker`: is a backward running, and when does the outermost one end."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable

NO_TASK = -1
"""What `backward_task` answers outside a backward."""


def backward_task() -> int:
    """The engine's id of the backward in whose node this thread is (a recomputed forward counts), or `NO_TASK`."""
    return int(torch._C._current_graph_task_id())


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
        on_death: Called while a backward's exception is on its way to the user, who may well go on to zero gradients.
            Must not block: other ranks may not have raised.
        on_failure: Called when a backward is entered, or work outside of one begins, and an earlier one is found to
            have raised.
    """

    def __init__(
        self, on_end: Callable[[], None], on_death: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        self._on_end = on_end
        self._on_death = on_death
        self._on_failure = on_failure
        self._tasks: dict[int, weakref.ref[_EndOfTask]] = {}
        self._current = NO_TASK  # the task seen last: ids are never used twice, so the same one is known and alive

    def enter(self, task: int) -> None:
        """To be called before every piece of work inside a backward, with the engine's id of it."""
        if task == self._current:
            return
        if any(ref() is None for ref in self._tasks.values()):
            self._fail()
        if task not in self._tasks:
            ended = _EndOfTask(task, self._ended)
            on_death = self._on_death
            self._tasks[task] = weakref.ref(ended, lambda _: on_death())
            Variable._execution_engine.queue_callback(ended)
        self._current = task

    def outside(self) -> None:
        """To be called before work outside a backward: one that was entered and has not ended has raised."""
        if self._tasks:
            self._fail()

    def forget(self) -> None:
        """Drops all tasks."""
        self._tasks.clear()
        self._current = NO_TASK

    def _fail(self) -> None:
        self.forget()
        self._on_failure()

    def _ended(self, task: int) -> None:
        self._tasks.pop(task, None)
        self._current = NO_TASK
        if all(ref() is None for ref in self._tasks.values()):
            self._tasks.clear()
            self._on_end()

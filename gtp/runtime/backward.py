"""`BackwardTracker`: is a backward running, and when does the outermost one end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from gtp.ops.compilers import never_compiled
from gtp.runtime.tracing import refuse_compiled_autograd

NO_TASK = -1
"""What `backward_task` answers outside a backward."""

_UNSURE = -2  # an inner backward has ended: whether the outer ones live is seen at the next work

backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""The engine's id of the backward in whose node this thread is (a recomputed forward counts), or `NO_TASK`."""


class _EndOfTask:
    """Queued as a final callback of one graph task, and referenced by nothing else.

    The engine drops it when the task is destroyed. So its death without a call means that the backward raised.
    """

    __slots__ = ("__weakref__", "_ended", "_task")

    def __init__(self, task: int, ended: Callable[[int], None]) -> None:
        self._task = task
        self._ended = ended

    @never_compiled
    def __call__(self) -> None:
        self._ended(self._task)


class BackwardTracker:
    """Follows the graph tasks in which gtp has work.

    [Note: nested backwards] Reentrant activation checkpointing runs an inner backward inside a node of the outer one,
    and the end of a task is the end of the backward when it is in no other. Where the recomputed forward uses a weight,
    it comes through gtp within the outer task, which so is known before the inner one. Where it does not (a norm, a
    frozen or skipped layer), an inner task may come first. The Python stack shows the node of the outer one, which
    cannot be joined from inside of the inner. It is joined when the inner task is destroyed, back in that node; and
    where another thread destroys it, in front of the node that runs next. No end counts before that.

    Args:
        on_end: Called once, inside the outermost `backward()`, after its last node. Calls `forget` when all is
            delivered; raises before, and the backward counts as one that raised.
        on_death: Called while the outermost backward's exception is on its way to the user, who may well go on to zero
            gradients. Must not block: other ranks may not have raised. What an inner one raises, the node around it
            may catch and go on; what had arrived by then stays, as without gtp.
        on_failure: Called when a backward is entered, or work outside of one begins, and an earlier one is found to
            have raised.

    Attributes:
        current: The task seen last. Ids are never used twice, so one seen again is known and alive; `NO_TASK` while no
            task is known.
    """

    def __init__(
        self, on_end: Callable[[], None], on_death: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        self._on_end = on_end
        self._on_death = on_death
        self._on_failure = on_failure
        self._tasks: dict[int, weakref.ref[_EndOfTask]] = {}
        self._over: dict[int, weakref.ref[_EndOfTask]] = {}  # have ended inside of another one
        self._outer: _Outer | None = None  # of the first of the tasks, which is in another one that is not known
        self.current = NO_TASK

    def enter(self, task: int) -> None:
        """To be called before every piece of work in a task that is not the `current` one.

        Args:
            task: The engine's id of the backward; `NO_TASK` outside of one, and in other threads than those of the
                backward that is running.
        """
        if any(ref() is None for ref in self._tasks.values()) or (task == NO_TASK and not self._tasks):
            self._fail()
        if task == NO_TASK:
            return
        if task not in self._tasks:
            self._follow(task)
        self.current = task

    def forget(self) -> None:
        """Drops all tasks."""
        self._tasks.clear()
        self._over.clear()
        self._expect_none()
        self.current = NO_TASK

    def _follow(self, task: int, *, behind: int = 0) -> None:
        """
        Args:
            behind: How many backwards inside of it have ended and are still on the Python stack.
        """
        refuse_compiled_autograd()
        end = _EndOfTask(task, self._ended)
        died = weakref.WeakMethod(self._died)

        def on_death(_: object) -> None:
            method = died()
            if method is not None:
                method(task)

        first = not self._tasks
        self._tasks[task] = weakref.ref(end, on_death)
        Variable._execution_engine.queue_callback(end)
        if first:
            node = node_around(behind)
            self._outer = None if node is None else _Outer(node, self._join)

    def _expect_none(self) -> None:
        if self._outer is not None:
            self._outer.forget()
        self._outer = None

    def _join(self) -> None:
        """In front of a node of the outer one."""
        self._expect_none()
        self.enter(backward_task())

    def _died(self, task: int) -> None:
        """Its end was reached inside of another one; or it raised, and so may do the one around it, or not."""
        is_over = self._over.pop(task, None) is not None
        outer = backward_task()
        if outer == NO_TASK and not self._other_lives(task):
            if not is_over:
                self._on_death()
            return
        self._tasks.pop(task, None)
        self.current = _UNSURE
        if outer != NO_TASK and outer not in self._tasks:
            self._expect_none()
            self._follow(outer, behind=1)

    def _fail(self) -> None:
        self.forget()
        self._on_failure()

    def _ended(self, task: int) -> None:
        self.current = _UNSURE
        if self._outer is not None or self._other_lives(task):
            self._over[task] = self._tasks.pop(task)
        else:
            self._on_end()

    def _other_lives(self, task: int) -> bool:
        return any(ref() is not None for other, ref in self._tasks.items() if other != task)


class _Outer:
    """A backward that is seen from inside of one of its nodes: calls `join()`, once, before its next node.

    Everything that a checkpointed function got and that requires a gradient has a node that runs next.
    """

    def __init__(self, node: Any, join: Callable[[], None]) -> None:
        reference = weakref.WeakMethod(join)
        self._handles: list[Any] = []

        def before(grads: Any) -> None:
            waits = bool(self._handles)
            self.forget()
            method = reference()
            if waits and method is not None:
                method()

        self._handles += [following.register_prehook(before) for following, _ in node.next_functions if following]

    def forget(self) -> None:
        """Joins no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def node_around(behind: int = 0) -> Any:
    """The Python node of an outer backward in which the present one was called; None if it is the outermost, or a hook
    called it.

    Args:
        behind: How many inner backwards' calls to pass by: they are on the stack, and over.
    """
    frame: Any = sys._getframe()
    for _ in range(behind + 1):
        frame = _caller(frame, _engine_run_backward)
    frame = _caller(frame, BackwardCFunction.apply)
    return None if frame is None else frame.f_locals["self"]


def _caller(frame: Any, function: Any) -> Any:
    """The next frame outside of `frame` that runs `function`, or None."""
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame

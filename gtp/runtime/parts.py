"""`Part`: a module that is captured by itself, its forward in one CUDA graph and its backward in another.

[Note: parts] What a line needs to know is when it begins and ends, and what it uses. In a capture of less than a step
nobody says so, and every consume is then a small line of its own: nothing is gathered ahead, and ranks wait for each
other at every weight. A part says so. Its forward is a line and its backward is one, each with a schedule of its own,
which the warm-up before the capture has taught. So within the part weights are gathered ahead, and not beyond it.

Parts exist while they are captured. Replays of their graphs do not come by here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gtp.runtime.backward import NO_TASK
from gtp.runtime.group import WeightGroup
from gtp.runtime.schedule import Schedule


class Scope:
    """What lines of one kind have in common: those of the whole model, or those of a part's forward or backward.

    Args:
        schedule: Predicts their consumes.
        groups: What they may use: the shards that are made current when one begins.
    """

    __slots__ = ("groups", "indices", "schedule")

    def __init__(self, schedule: Schedule, groups: Sequence[WeightGroup]) -> None:
        self.schedule = schedule
        self.use(groups)

    def use(self, groups: Sequence[WeightGroup]) -> None:
        """These and no others."""
        self.groups = groups
        self.indices = frozenset([group.index for group in groups])


class Part:
    """See [Note: parts].

    Args:
        new_schedule: Makes one that has learned nothing.
        groups: Of the whole model.
    """

    def __init__(self, new_schedule: Callable[[], Schedule], groups: Sequence[WeightGroup]) -> None:
        self.forward, self.backward = [Scope(new_schedule(), groups) for _ in range(2)]


class Parts:
    """The parts that are being captured, and whose backward is which.

    Attributes:
        added: The parts.
        task: The backward of a part that began last, by the engine's id; `NO_TASK` where it was inside of another one.
    """

    def __init__(self) -> None:
        self.added: list[Part] = []
        self._waiting: dict[int, list[Part]] = {}
        self.task = NO_TASK

    def await_backward(self, part: Part) -> None:
        """Its forward has run. Where parts share a weight, backwards come in the reverse order of the forwards."""
        for index in part.forward.indices:
            self._waiting.setdefault(index, []).append(part)

    def begin_backward(self, index: int) -> Part | None:
        """The part whose backward a use of this group begins, if it is one's."""
        waiting = self._waiting.get(index)
        if not waiting:
            return None
        part = waiting[-1]
        for parts in self._waiting.values():
            if part in parts:
                parts.remove(part)
        return part

    def forget(self) -> None:
        """They are captured."""
        self.added.clear()
        self._waiting.clear()

"""`Part`: a module that is captured by itself, its forward in one CUDA graph and its backward in another.

[Note: parts] What a line needs to know is when it begins and ends, and what it uses. In a capture of less than a step
nobody says so, and every consume is then a small line of its own: nothing is gathered ahead, and ranks wait for each
other at every weight. A part says so. Its forward is a line and its backward is one, each with a schedule of its own,
which the warm-up before the capture has taught. So within the part weights are gathered ahead, and not beyond it.

Parts exist while they are captured. Replays of their graphs do not come by here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gtp.runtime.group import WeightGroup
from gtp.runtime.schedule import Schedule


class Stretch:
    """What belongs to lines of one kind: those of the whole model, or those of a part's forward or backward.

    Args:
        schedule: Predicts its consumes.
        groups: What it may use: their shards are made current when a line of it begins.
    """

    __slots__ = ("groups", "indices", "schedule")

    def __init__(self, schedule: Schedule, groups: Sequence[WeightGroup]) -> None:
        self.schedule = schedule
        self.use(groups)

    def use(self, groups: Sequence[WeightGroup]) -> None:
        """Only these, from the next line on."""
        self.groups = groups
        self.indices = frozenset([group.index for group in groups])


class Part:
    """See [Note: parts].

    Args:
        new_schedule: Makes one that has learned nothing.
        groups: Of the whole model.
    """

    def __init__(self, new_schedule: Callable[[], Schedule], groups: Sequence[WeightGroup]) -> None:
        self.forward, self.backward = [Stretch(new_schedule(), groups) for _ in range(2)]

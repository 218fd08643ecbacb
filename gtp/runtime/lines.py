"""`Lines`: when lines begin and end, those of the whole model and those of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gtp.runtime.backward import NO_TASK, backward_task, node_around
from gtp.runtime.group import WeightGroup
from gtp.runtime.parts import Part, Parts
from gtp.runtime.replicated import ReplicatedGradients
from gtp.runtime.residency import Gatherer
from gtp.runtime.schedule import Phase, Schedule


class Lines:
    """Tells the gatherer where a consume belongs. See [Note: lines] and [Note: parts].

    Args:
        gatherer: Draws the lines.
        replicated: Hooks parameters that are trained by now, when a forward begins.
        parts: Those that are being captured.
        new_schedule: Makes one that has learned nothing.
        groups: Of the whole model.
        begin_work: To be called before any other work of a forward.
        abandon: To be called when a forward has raised.

    Attributes:
        in_forward: Whether a forward runs, of the whole model or of a part.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        replicated: ReplicatedGradients,
        parts: Parts,
        new_schedule: Callable[[], Schedule],
        groups: Sequence[WeightGroup],
        *,
        begin_work: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        self._gatherer = gatherer
        self._replicated = replicated
        self._parts = parts
        self._new_schedule = new_schedule
        self._groups = groups
        self._begin_work = begin_work
        self._abandon = abandon
        self.in_forward = False
        self._opening = False

    # -- of the whole model --------------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """A forward of the whole model begins.

        The line is drawn by the first use of a weight, and not here: the root's other pre-hooks, which may write
        shards or wait for somebody who does, come after this one. A forward that was left by a KeyboardInterrupt has
        not said so; this one begins anew all the same.
        """
        self._replicated.hook_trainable()
        self.in_forward = self._opening = True

    def exit_forward(self) -> None:
        """It has ended, by return or by exception. Without grad mode no backward follows: shards are free."""
        self.in_forward = False
        if not torch.is_grad_enabled():
            self._opening = False
            with torch.inference_mode(False), torch.no_grad():
                self._gatherer.close_line()

    def consume(self, group: WeightGroup, phase: Phase, inside: bool) -> list[torch.Tensor]:
        """The full weights of `group` for one GEMM.

        Args:
            inside: Whether a forward or a backward runs.
        """
        if self._opening and inside:
            self._opening = False
            with torch.no_grad():
                self._gatherer.open_line()
        elif not inside:
            self._replicated.hook_trainable()
        return self._gatherer.consume(group, phase, inside=inside)

    def forget_forward(self) -> None:
        """Whatever ran or was about to begin has raised."""
        self.in_forward = self._opening = False

    # -- of parts ------------------------------------------------------------------------------------------------

    def add_part(self) -> Part:
        """A module is about to be captured by itself: its forwards run inside `part_forward`, until `forget_parts`.

        Returns:
            What `part_forward` is given.
        """
        part = Part(self._new_schedule, self._groups)
        self._parts.added.append(part)
        return part

    @contextmanager
    def part_forward(self, part: Part) -> Iterator[None]:
        """A forward of a part, in a warm-up or a capture: a line of its own, as is the backward that begins next with a
        weight that it used. Inside of another forward, or recomputed in a backward, it is part of that.

        Raises:
            GTPStateError: a forward of the model waits for its backward.
        """
        if self.in_forward or backward_task() != NO_TASK:
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            self._begin_work()
            self._replicated.hook_trainable()
            self._gatherer.open_part(part.forward)
        self.in_forward = True
        try:
            yield
            self.in_forward = False
            with torch.inference_mode(False), torch.no_grad():
                self._gatherer.close_line()
        except BaseException:
            self._abandon()
            raise
        if torch.is_grad_enabled():
            self._parts.await_backward(part)

    def enter_part_backward(self, group: WeightGroup, task: int) -> None:
        """A backward uses a group: if it is one of a part and has just begun, its line does, too.

        Args:
            task: The engine's id of the backward.
        """
        if not self._gatherer.line_open and (part := self._parts.begin_backward(group.index)) is not None:
            self._parts.task = task if node_around() is None else NO_TASK
            self._gatherer.open_part(part.backward)

    def forget_parts(self) -> None:
        """The parts are captured."""
        self._parts.forget()

"""When each weight's gather starts and when its GEMM uses it, within one training step."""

from __future__ import annotations

import dataclasses

from gtp.runtime.runtime import GTPRuntime
from gtp.runtime.schedule import Phase, Schedule


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a weight.

    Attributes:
        weight: Its name.
        phase: "forward", "recompute" or "backward".
        use: Position of the use among the uses of the step.
        started: Position during which its gather was started; equal to `use` if it was late.
    """

    weight: str
    phase: str
    use: int
    started: int


def timeline(runtime: GTPRuntime) -> list[Use]:
    """The uses of the last training step, replayed through a schedule like the runtime's own.

    The schedule is a pure function of the sequence of uses, so a second one that sees the same step a few times decides
    what the first one decides.
    """
    names = [group.name for group in runtime.groups]
    index = {name: position for position, name in enumerate(names)}
    step = [(index[name], Phase[phase.upper()]) for name, phase in runtime.trace()]
    schedule = Schedule(
        [group.gathered_nbytes for group in runtime.groups],
        prefetch_bytes=runtime.config.prefetch_bytes,
        keep_bytes=runtime.config.keep_bytes,
    )
    uses: list[Use] = []
    for _ in range(3):
        uses = []
        started = dict.fromkeys(schedule.open().prefetch, 0)
        for position, (group, phase) in enumerate(step):
            decision = schedule.consume(group, phase)
            uses.append(Use(names[group], phase.name.lower(), position, started.pop(group, position)))
            if decision.keep:
                started[group] = position
            started |= dict.fromkeys(decision.prefetch, position)
        schedule.close()
    return uses

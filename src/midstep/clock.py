"""The clocks of a run, and what makes each of them tick.

Three clocks, because three things are counted and they part as soon as an update is skipped:
*data* ticks with every window, the *loss scale* with every attempted one (it lives with the
precision), and the *step* with applied updates only. The schedule reads the step and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .records import Verdict

__all__ = ["Clock"]


@dataclasses.dataclass(slots=True)
class Clock:
    """Counts what happened, and is the only thing that does.

    Attributes:
        update: Windows that ended in a verdict, whichever it was.
        step: Applied updates; drives the schedule.
        skipped_in_a_row: Skipped updates since the last applied one.
        epoch: Finished passes over the data.
        num_microbatches: Microbatches seen, also of skipped updates.
        denominators: Sum of each term's denominator over all windows: what was trained on.

    Example:
        >>> clock = Clock()
        >>> clock.tick(Verdict.SKIPPED_NONFINITE, num_microbatches=4, denominators={"loss": 10})
        >>> clock.tick(Verdict.APPLIED, num_microbatches=4, denominators={"loss": 7})
        >>> clock.update, clock.step, clock.skipped_in_a_row, clock.denominators
        (2, 1, 0, {'loss': 17})
    """

    update: int = 0
    step: int = 0
    skipped_in_a_row: int = 0
    epoch: int = 0
    num_microbatches: int = 0
    denominators: dict[str, float] = dataclasses.field(default_factory=dict)

    def tick(
        self, verdict: Verdict, *, num_microbatches: int, denominators: Mapping[str, float]
    ) -> None:
        """Count one window and its verdict."""
        self.update += 1
        self.num_microbatches += num_microbatches
        for term, denominator in denominators.items():
            self.denominators[term] = self.denominators.get(term, 0) + denominator
        if verdict.applied:
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        """Give every count as plain numbers."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counts of an earlier run."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])
        self.denominators = dict(self.denominators)

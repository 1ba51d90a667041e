"""What a schedule comes to: the rate of each update it will set, in a few numbers."""

import math
from dataclasses import dataclass

from .checks import whole_number
from .schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A schedule over the updates of one run, where the first update is update 1.

    Attributes:
        first: Factor of update 1.
        last: Factor of the last update.
        peak: Largest factor that an update uses.
        peak_update: The first update that uses it.
        minimum: Smallest factor after the peak.
        minimum_update: The first update that uses it.
        area: Sum of the factors: how many updates at the base rate it is worth.
        after: Factor of the first update past the end.
    """

    first: float
    last: float
    peak: float
    peak_update: int
    minimum: float
    minimum_update: int
    area: float
    after: float

    @classmethod
    def of(cls, schedule: Schedule, total: int) -> "Facts":
        """Run through the updates of a schedule.

        Args:
            schedule: From the number of applied updates to the factor.
            total: Updates of the run, at least 1.

        Example:
            >>> from midstep.schedules import cosine
            >>> facts = Facts.of(cosine(total=10, warmup=4, minimum=0.1), 10)
            >>> facts.first, facts.peak_update, facts.last
            (0.25, 4, 0.1)
        """
        factors = [schedule(step) for step in range(whole_number("total", total, at_least=1))]
        top = factors.index(max(factors))
        low = top + factors[top:].index(min(factors[top:]))
        return cls(
            first=factors[0],
            last=factors[-1],
            peak=factors[top],
            peak_update=top + 1,
            minimum=factors[low],
            minimum_update=low + 1,
            area=math.fsum(factors),
            after=schedule(total),
        )

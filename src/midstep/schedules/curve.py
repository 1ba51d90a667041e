"""A rate that passes through given values on given updates.

Nearly every schedule in use is such a curve, and nearly every difference of convention is only
where its points lie: a peak on update 99 or 100, a minimum on the last update or one after it.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from .checks import Shape, real_number, shape_of_change
from .schedule import Schedule

Point: TypeAlias = tuple[float, float]  # update, factor


class Leg(NamedTuple):
    """Where a curve goes next: the update, the factor it has there, and the way it gets there."""

    update: float
    factor: float
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Schedule):
    """Pass through given factors on given updates.

    Between a point `(a, x)` and the next one `(b, y)`:

        f(s) = x * (1 - p) + y * p,  p = shape((s - a) / (b - a))

    Before the first point the factor is that of the first. Points may lie between updates, or
    before update 0: a warm-up over `W` updates that begins at `1 / W` comes from `(-1, 0.0)`.

    Args:
        start: The first point, as update and factor.
        legs: The points that follow, each with the shape of the way that leads to it. Updates
            must not fall; two points on one update make the rate jump there.
        holds: Whether the factor stays at its last value after the last point. False lets the last
            formula run on, by which a cosine rises again and a line falls below 0.

    Example:
        >>> from midstep.schedules.shapes import Cosine, Linear
        >>> curve = Curve.through((-1, 0.0), (3, 1.0, Linear()), (11, 0.1, Cosine()))
        >>> [round(curve(step), 3) for step in (0, 3, 7, 11, 50)]
        [0.25, 1.0, 0.55, 0.1, 0.1]
    """

    start: Point
    legs: tuple[Leg, ...]
    holds: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", tuple(self.start))
        object.__setattr__(self, "legs", tuple(Leg(*leg) for leg in self.legs))
        if not self.legs:
            raise ValueError(
                f"`Curve(start={self.start})` has no `legs`, so it goes nowhere. Give at least one "
                "point to go to, or use `Constant`."
            )
        updates = [self.start[0], *(leg.update for leg in self.legs)]
        for update in updates:
            real_number("update", update, low=-math.inf)
        for factor in (self.start[1], *(leg.factor for leg in self.legs)):
            real_number("factor", factor)
        for leg in self.legs:
            shape_of_change(leg.shape)
        if updates != sorted(updates) or updates[-1] == updates[-2]:
            raise ValueError(
                f"`Curve` has points on updates {updates}, but they must not fall and the last leg "
                "must last, because a step has one factor. Put the points in order."
            )

    @classmethod
    def through(
        cls, start: Point, *legs: tuple[float, float, Shape], holds: bool = True
    ) -> "Curve":
        """Return the curve with the legs that last, so that a warm-up of 0 updates leaves no trace.

        A leg that begins and ends on one update is left out where it changes nothing that is seen:
        at the start, which moves to its end, and where the factor is the same. So equal curves
        compare equal, however many empty phases they were described with.

        Args:
            start: The first point, as update and factor.
            *legs: Update, factor and shape of each point that follows.
            holds: Whether the factor stays at its last value after the last point.

        Returns:
            The curve through what is left.

        Example:
            >>> from midstep.schedules.shapes import Linear
            >>> line = Linear()
            >>> Curve.through((0, 0.0), (0, 1.0, line), (8, 0.0, line))
            Curve(start=(0, 1.0), legs=(Leg(update=8, factor=0.0, shape=Linear()),), holds=True)
        """
        kept: list[Leg] = []
        for leg in map(Leg._make, legs):
            update, factor = kept[-1][:2] if kept else start
            if leg.update != update or (kept and leg.factor != factor):
                kept.append(leg)
            elif not kept:
                start = leg.update, leg.factor
        return cls(start=start, legs=tuple(kept), holds=holds)

    def _factor(self, step: int) -> float:
        if step < self.start[0]:
            return self.start[1]
        index = bisect_right(self.legs, step, key=attrgetter("update"))
        if index == len(self.legs):
            if self.holds:
                return self.legs[-1].factor
            index -= 1
        update, factor, shape = self.legs[index]
        last_update, last_factor = self.legs[index - 1][:2] if index else self.start
        done = shape((step - last_update) / (update - last_update))
        # Exact at both ends. `last_factor + (factor - last_factor) * done` is not: it misses 0.1 by
        # a bit on the last update of a curve that does not hold.
        return last_factor * (1.0 - done) + factor * done

"""The few schedules that are not a curve through points: one value, a tail without end, cycles."""

import math
from dataclasses import dataclass

from .checks import Shape, positive, ratio, real_number, shape_of_change, whole_number
from .schedule import Schedule
from .shapes import Cosine

_COSINE = Cosine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Schedule):
    """Use one factor on every step.

        f(s) = factor

    Args:
        factor: Of the base rate, 0 or more.

    Example:
        >>> Constant(factor=0.5)(1000)
        0.5
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        real_number("factor", self.factor)

    def _factor(self, step: int) -> float:
        return self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt(Schedule):
    """Fall with the square root of time, for ever: no end need be known.

        f(s) = max(minimum, sqrt(timescale / (timescale + s + elapsed)))

    Its step 0 is the first update after the peak. With a warm-up of `timescale` updates before it,
    the whole falls as `sqrt(timescale / (updates applied))`; `inverse_sqrt` joins the two.

    Args:
        timescale: Updates after which the factor is 1 / sqrt(2); greater than 0.
        minimum: The factor is never below it; from 0 to 1.
        elapsed: Updates that count as over on step 0. 1 has the peak behind it; 0 is on the peak.

    Example:
        >>> InverseSqrt(timescale=100)(299)
        0.5

    Reference: Vaswani et al. 2017, arXiv:1706.03762, equation 3.
    """

    timescale: float
    minimum: float = 0.0
    elapsed: int = 1

    def __post_init__(self) -> None:
        positive("timescale", self.timescale)
        ratio("minimum", self.minimum)
        whole_number("elapsed", self.elapsed)

    def _factor(self, step: int) -> float:
        return max(self.minimum, math.sqrt(self.timescale / (self.timescale + step + self.elapsed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRestarts(Schedule):
    """Decay again and again, each time from the peak, in cycles that may grow.

        f(s) = 1 - (1 - minimum) * shape(step in its cycle / length of its cycle)

    The peak is used on the first update of every cycle. The minimum is approached and never used:
    the restart falls on the update that would have used it.

    Args:
        first: Updates in the first cycle.
        growth: Every cycle is this many times as long as the one before; a whole number from 1.
        minimum: Where a cycle tends to, as a ratio of the base rate; from 0 to 1.
        shape: Of the fall inside a cycle, from `midstep.schedules.shapes`.

    Example:
        >>> restarts = WarmRestarts(first=4, growth=2)
        >>> [round(restarts(step), 3) for step in (0, 2, 3, 4, 8, 12)]
        [1.0, 0.5, 0.146, 1.0, 0.5, 1.0]

    Reference: Loshchilov & Hutter 2016, arXiv:1608.03983.
    """

    first: int
    growth: int = 1
    minimum: float = 0.0
    shape: Shape = _COSINE

    def __post_init__(self) -> None:
        whole_number("first", self.first, at_least=1)
        whole_number("growth", self.growth, at_least=1)
        ratio("minimum", self.minimum)
        shape_of_change(self.shape)

    def _factor(self, step: int) -> float:
        done = self.shape(self._share_of_cycle(step))
        return (1.0 - done) + self.minimum * done

    def _share_of_cycle(self, step: int) -> float:
        if self.growth == 1:
            return step % self.first / self.first
        # Whole numbers instead of a logarithm, which is a cycle off where rounding puts it below.
        length = self.first
        while step >= length:
            step -= length
            length *= self.growth
        return step / length

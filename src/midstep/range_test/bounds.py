"""Bounds: which rates a curve of losses speaks for, and when it speaks for none.

The rate rises with every point, the loss is that of the update made at it. The curve is flat while
the rate is too small to matter, falls, and rises or breaks once the rate is too large.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple

import numpy as np

from .smoothing import Flags, Floats, LocalLine, median_spread, without_lone_outliers

__all__ = ["CeilingKind", "Indices", "Outcome", "find_bounds"]

MIN_POINTS = 12
_NUM_FOR_NOISE = 20  # points; fewer give noise that is off by half
_SURE = 5.0  # standard errors that a fall must have
_NUM_IN_A_ROW = 3  # points that must agree before a rise is one


class Outcome(enum.StrEnum):
    """What a curve of losses over rising rates shows."""

    DESCENT = "descent"
    NO_DESCENT = "no_descent"
    NO_DESCENT_THEN_DIVERGED = "no_descent_then_diverged"
    DIVERGED_FROM_START = "diverged_from_start"
    TOO_SHORT = "too_short"


class CeilingKind(enum.StrEnum):
    """Why no larger rate can be used.

    `RISE`: the loss rose. `NONFINITE`: it was inf or nan, without rising before, so that the true
    ceiling may be lower. `CENSORED`: neither happened up to the last rate tried.
    """

    RISE = "rise"
    NONFINITE = "nonfinite"
    CENSORED = "censored"


@dataclasses.dataclass(frozen=True, slots=True)
class Indices:
    """Where the bounds lie on the curve; None for one that the curve does not have.

    Attributes:
        outcome: What the curve shows.
        lower: Last point before the loss has fallen by a tenth of its whole fall.
        steepest: Where it falls fastest.
        upper: First point at which nine tenths of the fall are done, at most half the ceiling.
        ceiling: Last point before the loss has risen by a quarter of the fall, or before it broke.
        ceiling_kind: Which of the two.
        num_sigmas: The fall in its own standard errors.
        smooth: The curve without its noise.
    """

    outcome: Outcome
    lower: int | None = None
    steepest: int | None = None
    upper: int | None = None
    ceiling: int | None = None
    ceiling_kind: CeilingKind | None = None
    num_sigmas: float = 0.0
    smooth: Floats = dataclasses.field(default_factory=lambda: np.empty(0))


def find_bounds(lr: Floats, loss: Floats, *, is_broken: bool, line: LocalLine) -> Indices:
    """Find the bounds on one curve.

    Args:
        lr: Rising rates, on an even geometric grid; at least `MIN_POINTS`. Shape [num_points].
        loss: Finite losses, one a rate. Shape [num_points].
        is_broken: Whether the next loss was inf or nan.
        line: Smooths a curve of this length.
    """
    y = without_lone_outliers(loss)
    num_flat = max(5, len(y) // 10)
    start = float(np.median(y[:num_flat]))
    sigma = median_spread(y[: max(_NUM_FOR_NOISE, _rough_minimum(y) + 1)])
    # So that the blow-up does not leak back into the fall.
    capped = np.minimum(y, start + 2 * max(start - float(y.min()), _SURE * sigma))
    v = line.value(capped)
    best = _minimum(v, start)
    depth = start - float(v[best]) if best >= num_flat else 0.0
    # Where the curve is flat: a line misses a steep fall by errors that resemble each other, too.
    flat = _last(v[:best] > start - depth / 4) + 1
    end = flat if flat >= MIN_POINTS else max(best + 1, _NUM_FOR_NOISE)
    noise = _noise(capped[:end] - v[:end], sigma)
    error = noise.of_a_mean * math.hypot(1.25 / num_flat**0.5, line.noise_gain(best))
    num_sigmas = depth / error if error else math.inf * depth
    if not num_sigmas >= _SURE:
        low = min(start, float(v[0]))
        rise = _rise(y, v, low + _SURE * sigma, low + _SURE * noise.of_a_point, line)
        return _without_descent(v, rise, is_broken)
    for _ in range(2):  # a longer flat part is a better start
        flat = _last(v[:best] > start - depth / 4)
        start = float(np.median(y[: max(num_flat, flat + 1)]))
        depth = start - float(v[best])
    high = float(v[best]) + max(depth / 4, 3 * sigma)
    ceiling, kind = _ceiling(v[best:] > high, best, len(v), is_broken)
    if ceiling is not None and kind is CeilingKind.RISE:
        ceiling = _before_it_rose(y, ceiling, high, line)
    last = len(v) - 1
    if ceiling is not None:
        last = max(0, int(np.searchsorted(lr, lr[ceiling] / 2, side="right")) - 1)
    middle = max(0, _last(v[:best] > start - depth / 2))
    upper = min(last, middle + int(np.argmax(v[middle:] <= v[best] + depth / 10)))
    lower = min(upper, max(0, _last(v[: middle + 1] > start - depth / 10)))
    steepest = lower + int(np.argmin(line.slope(capped)[lower : upper + 1]))
    return Indices(Outcome.DESCENT, lower, steepest, upper, ceiling, kind, num_sigmas, v)


def _minimum(v: Floats, start: float) -> int:
    """Find the lowest point before the curve has come back to where it began.

    What falls once more after a blow-up is luck. A bump on the way down is not a blow-up.
    """
    best = int(np.argmin(v))
    if not v[best] < start:
        return best
    fallen = int(np.argmax(v < (start + v[best]) / 2))
    back = _first_run(v[fallen:best] > start)
    return best if back is None else int(np.argmin(v[: fallen + back]))


def _rise(y: Floats, v: Floats, high: float, sure: float, line: LocalLine) -> int | None:
    """Find where a curve without a fall rises: seen in the losses, placed by the smooth curve."""
    seen = _first_run(y > sure)
    if seen is None:
        return None
    near = max(0, seen - 2 * line.half_width)
    placed = _first_run(v[near : seen + 1] > high)
    return seen if placed is None else near + placed


def _without_descent(v: Floats, run: int | None, is_broken: bool) -> Indices:
    """Say why there are no bounds; where the curve broke or rose, the ceiling is still known."""
    if run is not None:
        is_early = run < 0.15 * len(v)
        outcome = Outcome.DIVERGED_FROM_START if is_early else Outcome.NO_DESCENT_THEN_DIVERGED
        return Indices(outcome, ceiling=max(0, run - 1), ceiling_kind=CeilingKind.RISE, smooth=v)
    if is_broken:
        last, kind = len(v) - 1, CeilingKind.NONFINITE
        return Indices(Outcome.NO_DESCENT_THEN_DIVERGED, ceiling=last, ceiling_kind=kind, smooth=v)
    return Indices(Outcome.NO_DESCENT, ceiling_kind=CeilingKind.CENSORED, smooth=v)


def _ceiling(
    is_high: Flags, best: int, num_points: int, is_broken: bool
) -> tuple[int | None, CeilingKind]:
    run = _first_run(is_high)
    if run is not None:
        return best + run - 1, CeilingKind.RISE
    if is_broken:
        return num_points - 1, CeilingKind.NONFINITE
    return None, CeilingKind.CENSORED


def _before_it_rose(y: Floats, ceiling: int, high: float, line: LocalLine) -> int:
    """Step on to where the losses themselves rise: what smoothes spreads an abrupt rise ahead."""
    last = min(ceiling + line.half_width, len(y) - 2)
    while ceiling < last and max(y[ceiling + 1 : ceiling + 3]) <= high:
        ceiling += 1
    return ceiling


def _rough_minimum(y: Floats) -> int:
    medians = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, "edge"), 5), axis=1)
    return int(np.argmin(medians))


class _Noise(NamedTuple):
    of_a_point: float  # standard deviations
    of_a_mean: float  # times the root of the number of points


def _noise(residuals: Floats, sigma: float) -> _Noise:
    """Widen a standard deviation that second differences gave, where they do not see all of it.

    Where each point resembles the one before, second differences are smaller than the noise, and
    means are less sure. Residuals of a local line look less alike than the noise is; the line from
    one to the other was fitted to autoregressive noise at 100 points and a half-width of 6. The
    median is blind to how far the farthest points stray, which means are not.
    """
    r = residuals - residuals.mean()
    power = float(r @ r)
    if power == 0.0:
        return _Noise(sigma, sigma)
    seen = float(r[1:] @ r[:-1]) / power
    rho = min(0.8, max(0.0, 0.3 + 1.55 * (seen - 0.03)))
    point = sigma * math.sqrt(3 / (3 - 4 * rho + rho**2))
    return _Noise(point, max(point, math.sqrt(power / len(r))) * math.sqrt((1 + rho) / (1 - rho)))


def _last(mask: Flags) -> int:
    found = np.flatnonzero(mask)
    return int(found[-1]) if len(found) else -1


def _first_run(mask: Flags) -> int | None:
    """Give the first of `_NUM_IN_A_ROW` points in a row; the end of a curve may cut a run short."""
    length = 0
    for index, is_set in enumerate(mask):
        length = length + 1 if is_set else 0
        if length == _NUM_IN_A_ROW:
            return index - _NUM_IN_A_ROW + 1
    return None

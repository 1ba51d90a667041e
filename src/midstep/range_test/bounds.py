"""Bounds: which rates a curve of losses speaks for, and when it speaks for none.

The rate rises with every point, the loss is that of the update made at it. The curve is flat while
the rate is too small to matter, falls, and rises or breaks once the rate is too large.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from .smoothing import Flags, Floats, LocalLine, median_spread, without_lone_outliers

__all__ = ["CeilingKind", "Indices", "Outcome", "find_bounds"]

MIN_POINTS = 12
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
    sigma = median_spread(y[: max(MIN_POINTS, _rough_minimum(y) + 1)])
    # So that the blow-up does not leak back into the fall.
    y = np.minimum(y, start + 2 * max(start - float(y.min()), _SURE * sigma))
    v = line.value(y)
    best = _minimum(v, start)
    depth = start - float(v[best]) if best >= num_flat else 0.0
    error = sigma * math.hypot(1.25 / num_flat**0.5, line.noise_gain(best))
    # Where the curve is flat: a line misses a steep fall by errors that resemble each other, too.
    flat = _last(v[:best] > start - depth / 4) + 1
    noise = slice(None, flat if flat >= MIN_POINTS else best + 1)
    error *= _inflation(y[noise] - v[noise])
    num_sigmas = depth / error if error else math.inf * depth
    if not num_sigmas >= _SURE:
        return _without_descent(v, start, sigma, error, is_broken, smooth=v)
    for _ in range(2):  # a longer flat part is a better start
        flat = _last(v[:best] > start - depth / 4)
        start = float(np.median(y[: max(num_flat, flat + 1)]))
        depth = start - float(v[best])
    middle = max(0, _last(v[:best] > start - depth / 2))
    lower = max(0, _last(v[: middle + 1] > start - depth / 10))
    upper = middle + int(np.argmax(v[middle:] <= v[best] + depth / 10))
    steepest = lower + int(np.argmin(line.slope(y)[lower : upper + 1]))
    is_high = v[best:] > v[best] + max(depth / 4, 3 * sigma)
    ceiling, kind = _ceiling(is_high, best, len(v), is_broken)
    if ceiling is not None:
        half = int(np.searchsorted(lr, lr[ceiling] / 2, side="right")) - 1
        upper = max(0, min(upper, half))
    lower = min(lower, upper)
    return Indices(
        Outcome.DESCENT, lower, min(steepest, upper), upper, ceiling, kind, num_sigmas, v
    )


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


def _without_descent(
    v: Floats, start: float, sigma: float, error: float, is_broken: bool, *, smooth: Floats
) -> Indices:
    """Say why there are no bounds; where the curve broke or rose, the ceiling is still known."""
    is_high = v > min(start, float(v[0])) + _SURE * max(sigma, error)
    run = _first_run(is_high)
    if run is not None:
        is_early = run < 0.15 * len(v)
        outcome = Outcome.DIVERGED_FROM_START if is_early else Outcome.NO_DESCENT_THEN_DIVERGED
        return Indices(
            outcome, ceiling=max(0, run - 1), ceiling_kind=CeilingKind.RISE, smooth=smooth
        )
    if is_broken:
        last, kind = len(v) - 1, CeilingKind.NONFINITE
        return Indices(
            Outcome.NO_DESCENT_THEN_DIVERGED, ceiling=last, ceiling_kind=kind, smooth=smooth
        )
    return Indices(Outcome.NO_DESCENT, ceiling_kind=CeilingKind.CENSORED, smooth=smooth)


def _ceiling(
    is_high: Flags, best: int, num_points: int, is_broken: bool
) -> tuple[int | None, CeilingKind]:
    run = _first_run(is_high)
    if run is not None:
        return best + run - 1, CeilingKind.RISE
    if is_broken:
        return num_points - 1, CeilingKind.NONFINITE
    return None, CeilingKind.CENSORED


def _rough_minimum(y: Floats) -> int:
    medians = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, "edge"), 5), axis=1)
    return int(np.argmin(medians))


def _inflation(residuals: Floats) -> float:
    """How much larger errors are where each point resembles the one before.

    Residuals of a local line look less alike than the noise is; the line from one to the other was
    fitted to autoregressive noise at 100 points and a half-width of 6.
    """
    r = residuals - residuals.mean()
    power = float(r @ r)
    if power == 0.0 or len(r) < MIN_POINTS:
        return 1.0
    seen = float(r[1:] @ r[:-1]) / power
    rho = min(0.8, max(0.0, 0.3 + 1.55 * (seen - 0.03)))
    # Memory makes means less sure, and second differences smaller than the noise is.
    return math.sqrt((1 + rho) / (1 - rho) * 3 / (3 - 4 * rho + rho**2))


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

"""Measures that one wild value does not move: medians, spreads and parts of a run."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..run import Flags, Floats, Run

__all__ = [
    "NORMAL",
    "fifths",
    "finite",
    "longest_streak",
    "percent",
    "short",
    "spread",
    "stepped",
    "times",
    "trailing_median",
]

NORMAL = 1.4826  # a median absolute deviation times this is the sigma of a normal distribution


def finite(values: Floats) -> Floats:
    """Leave out what is nan or infinite."""
    return values[np.isfinite(values)]


def stepped(run: Run, name: str) -> tuple[Floats, Floats]:
    """Give updates and values of a column where the update was applied and the value is finite.

    Args:
        run: The run.
        name: Of the column.
    """
    values = run.column(name)
    kept = run.applied & np.isfinite(values)
    return run.updates[kept], values[kept]


def spread(values: Floats) -> float:
    """The sigma of most of the values: the median distance from the median, times 1.48."""
    return float(NORMAL * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def fifths(values: Floats) -> Floats:
    """The median of each fifth."""
    return np.array([np.median(part) for part in np.array_split(values, 5)])


def trailing_median(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Median and spread of the `window` values before each value; nan where there are fewer.

    Costs `len(values) * window` numbers of memory, for a moment.

    Args:
        values: Finite ones.
        window: How many.
    """
    middle, width = np.full(len(values), np.nan), np.full(len(values), np.nan)
    if len(values) > window:
        for first in range(window, len(values), 20_000):
            last = min(first + 20_000, len(values))
            before = sliding_window_view(values[first - window : last - 1], window)
            medians = np.median(before, axis=1)
            middle[first:last] = medians
            gaps = np.abs(before - medians[:, None])
            width[first:last] = NORMAL * np.median(gaps, axis=1)
    return middle, width


def longest_streak(flags: Flags) -> tuple[int, int]:
    """Where the longest row of true begins, and how long it is; (0, 0) where there is none.

    Example:
        >>> longest_streak(np.array([True, False, True, True]))
        (2, 2)
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])


def short(value: float) -> str:
    """Give a number in three digits.

    Example:
        >>> short(0.012345), short(65536.0), short(3.0)
        ('0.0123', '65,536', '3')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.2e}"


def percent(share: float) -> str:
    """Give a share in percent.

    Example:
        >>> percent(1.0), percent(0.213)
        ('100 %', '21.3 %')
    """
    return f"{100 * share:.3g} %"


def times(ratio: float) -> str:
    """Give a ratio as a multiple.

    Example:
        >>> times(12.34), times(0.5)
        ('12.3 times', '0.5 times')
    """
    return f"{short(ratio)} times"

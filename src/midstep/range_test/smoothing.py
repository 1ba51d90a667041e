"""Smoothing without lag: a local line at every point, and what it does to noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flags", "Floats", "LocalLine", "median_spread", "without_lone_outliers"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_NORMAL = 1.4826  # median absolute deviation to standard deviation, of a normal distribution


class LocalLine:
    """A line through the neighbours of each point, weighted by a tricube: its value and slope.

    Points are read on an even grid, as a geometric rise of the rate gives them. A running average
    lags behind a falling loss by its own length; a line does not.

    Args:
        num_points: Length of the curves it is for.
        half_width: Neighbours to each side that have weight.

    Example:
        >>> line = LocalLine(9, 3)
        >>> bool(np.allclose(line.value(np.arange(9.0)), np.arange(9.0)))
        True
    """

    def __init__(self, num_points: int, half_width: int) -> None:
        self.half_width = half_width
        at = np.arange(num_points)
        away = at[None, :] - at[:, None]
        weight = (1 - np.minimum(np.abs(away) / (half_width + 1), 1) ** 3) ** 3
        total = weight.sum(1)
        mean = (weight * away).sum(1) / total
        centred = away - mean[:, None]
        spread = (weight * centred**2).sum(1)
        slope = weight * centred / spread[:, None]
        self._value = weight / total[:, None] - mean[:, None] * slope
        self._slope = slope

    def value(self, y: Floats) -> Floats:
        """Give the height of each line at its point."""
        height: Floats = self._value @ y
        return height

    def slope(self, y: Floats) -> Floats:
        """Give the slope of each line, per point."""
        slope: Floats = self._slope @ y
        return slope

    def noise_gain(self, index: int) -> float:
        """Give the standard deviation of one smoothed value under noise of deviation 1."""
        return float(np.linalg.norm(self._value[index]))


def median_spread(y: Floats) -> float:
    """Estimate the noise of a curve from its second differences, which a slope does not enter.

    Returns:
        A standard deviation, right for independent normal noise.
    """
    return _NORMAL * float(np.median(np.abs(np.diff(y, 2)))) / 6**0.5


def without_lone_outliers(y: Floats) -> Floats:
    """Put the median of its neighbours for a point that stands alone, 4 deviations off.

    A rise of several points is a rise, and the last three points are never touched: there a curve
    may be about to leave.
    """
    half_width, num_deviations = 3, 4.0
    padded = np.pad(y, half_width, mode="edge")
    near = np.lib.stride_tricks.sliding_window_view(padded, 2 * half_width + 1)
    median = np.median(near, axis=1)
    spread = _NORMAL * np.median(np.abs(near - median[:, None]), axis=1)
    is_far = np.abs(y - median) > num_deviations * spread
    has_far_neighbour = np.pad(is_far, 1)[:-2] | np.pad(is_far, 1)[2:]
    is_lone = is_far & ~has_far_neighbour
    is_lone[-3:] = False
    return np.where(is_lone, median, y)

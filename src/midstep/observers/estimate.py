"""The noise scale from sums of squares: averages with a fading memory, and the ratio of two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["NoiseEstimate", "ratio_interval", "student_quantile"]


class NoiseEstimate:
    """Averages of tr(Sigma) and ||G||^2 over windows, the newest counting most.

    Args:
        window: Windows after which one counts 1/e as much as the newest.

    Example:
        >>> estimate = NoiseEstimate(50)
        >>> estimate.add(52.0, 25.0, 2, 2)  # two rows with gradients 4 and 6
        True
        >>> estimate.fields()
        {'noise_scale': 0.0833...}
    """

    def __init__(self, window: int) -> None:
        self._keep = 1.0 - 1.0 / window
        self._sums = _Sums()

    def add(self, square_sum: float, square: float, total: float, num: int) -> bool:
        """Take in a window.

        Args:
            square_sum: n_k * ||g_k||^2, summed over the microbatches.
            square: ||g||^2 of the window.
            total: N, the sum of the n_k.
            num: K, the number of microbatches.

        Returns:
            Whether it says anything: at least two microbatches, and all of it finite.
        """
        if num < 2 or not math.isfinite(square_sum - square):
            return False
        trace = (square_sum - total * square) / (num - 1)
        self._sums.add(trace, square - trace / total, self._keep)
        return True

    def fields(self) -> dict[str, float]:
        """Give the ratio, and where it lies with 95 % confidence from the second window on."""
        sums = self._sums
        trace, square = sums.mean_x, sums.mean_y
        scale = max(0.0, trace) / square if square > 0.0 else math.inf
        if sums.weight * sums.weight <= 1.5 * sums.weight_squared:
            return {"noise_scale": scale}
        low, high = ratio_interval(
            (trace, square), sums.covariance_of_means(), student_quantile(sums.num_effective - 1.0)
        )
        return {"noise_scale": scale, "noise_scale_low": low, "noise_scale_high": high}

    def state_dict(self) -> dict[str, Any]:
        """Give the averages as plain numbers."""
        return dataclasses.asdict(self._sums)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the averages of an earlier run."""
        self._sums = _Sums(**state)


@dataclasses.dataclass(slots=True)
class _Sums:
    """Weighted means and scatter of pairs, updated as West 1979 does, so that nothing cancels."""

    weight: float = 0.0
    weight_squared: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    scatter_xx: float = 0.0
    scatter_xy: float = 0.0
    scatter_yy: float = 0.0

    def add(self, x: float, y: float, keep: float) -> None:
        """Take in a pair; all earlier ones count `keep` times as much as before."""
        self.weight = self.weight * keep + 1.0
        self.weight_squared = self.weight_squared * keep * keep + 1.0
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += dx / self.weight
        self.mean_y += dy / self.weight
        self.scatter_xx = self.scatter_xx * keep + dx * (x - self.mean_x)
        self.scatter_xy = self.scatter_xy * keep + dx * (y - self.mean_y)
        self.scatter_yy = self.scatter_yy * keep + dy * (y - self.mean_y)

    @property
    def num_effective(self) -> float:
        """How many equal weights would average as well."""
        return self.weight * self.weight / self.weight_squared

    def covariance_of_means(self) -> tuple[float, float, float]:
        """Estimate var(mean x), cov(mean x, mean y) and var(mean y), for independent pairs."""
        # Unbiased for weights that say how reliable a pair is: W - sum(w^2) / W in place of n - 1.
        free = self.weight - self.weight_squared / self.weight
        scale = self.weight_squared / (self.weight * self.weight) / free
        return self.scatter_xx * scale, self.scatter_xy * scale, self.scatter_yy * scale


def ratio_interval(
    means: tuple[float, float], covariance: tuple[float, float, float], quantile: float
) -> tuple[float, float]:
    """Find the ratios x/y >= 0 that two means do not speak against.

        all B with (x - B y)^2 <= t^2 * (v_xx - 2 B v_xy + B^2 v_yy)

    Args:
        means: x and y.
        covariance: v_xx, v_xy and v_yy of these means.
        quantile: t.

    Returns:
        The least and the greatest; inf where y cannot be told from 0.

    Example:
        >>> ratio_interval((2.0, 1.0), (0.01, 0.0, 0.0), 2.0)
        (1.8, 2.2)

    Reference: Fieller 1954, Journal of the Royal Statistical Society B 16, pages 175 to 185.
    """
    (x, y), (v_xx, v_xy, v_yy), t = means, covariance, quantile
    a = y * y - t * t * v_yy
    b = x * y - t * t * v_xy
    c = x * x - t * t * v_xx
    inside = b * b - a * c
    if a <= 0.0 or y <= 0.0:
        # The ratios lie outside the roots, on the side of large ones.
        if c <= 0.0 or x <= 0.0 or inside <= 0.0:
            return 0.0, math.inf
        return max(0.0, c / (b + math.sqrt(inside))), math.inf
    reach = math.sqrt(max(0.0, inside))
    return max(0.0, (b - reach) / a), max(0.0, (b + reach) / a)


def student_quantile(freedom: float) -> float:
    """Give the number that |t| exceeds in 5 % of cases.

    Args:
        freedom: Degrees of freedom, at least 1; need not be whole.

    Example:
        >>> [round(student_quantile(n), 3) for n in (1, 2, 10, 1e9)]
        [12.706, 4.303, 2.228, 1.96]

    Reference: Hill 1970, Communications of the ACM 13, algorithm 396.
    """
    n, p = max(1.0, freedom), 0.05
    if n < 1.0 + 1e-9:
        return 1.0 / math.tan(p * math.pi / 2.0)
    if abs(n - 2.0) < 1e-9:
        return math.sqrt(2.0 / (p * (2.0 - p)) - 2.0)
    a = 1.0 / (n - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * n
    y = (d * p) ** (2.0 / n)
    if y > 0.05 + a:
        x = -1.9599639845400545
        y = x * x
        if n < 5.0:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = a * y * y
        y = math.expm1(y)
    else:
        y = (
            (1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0))
            * y
            - 1.0
        ) * (n + 1.0) / (n + 2.0) + 1.0 / y
    return math.sqrt(n * y)

"""Batches: how far a larger one still saves updates, from the noise of the gradient.

    updates = least updates * (1 + noise scale / batch)
    targets = least targets * (1 + batch / noise scale)

At the noise scale itself a run takes twice the least updates and twice the least targets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

__all__ = ["BatchAdvice", "BatchChoice", "advise_batch"]

_NUM_RECENT = 20  # estimates at the end of the log that are believed
_MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchChoice:
    """One batch size beside the one that was trained with.

    Attributes:
        batch: Targets an update.
        updates: Updates that it takes to the same loss, over those of the present batch.
        targets: Targets that it takes, over those of the present batch.
    """

    batch: float
    updates: float
    targets: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """What a noise scale says about the batch.

    Attributes:
        batch: Targets an update, as trained.
        noise_scale: Median of the last estimates, in the same unit.
        low: Lower end of its interval.
        high: Upper end.
        unit: What is counted.
        choices: Batches from a quarter to eight times the present one.
    """

    batch: float
    noise_scale: float
    low: float
    high: float
    unit: str
    choices: tuple[BatchChoice, ...]

    def lines(self) -> Iterator[str]:
        """Give the table, and what it says."""
        unit = self.unit
        yield (
            f"noise scale {self.noise_scale:,.0f} {unit}, 80 % within {self.low:,.0f} .. "
            f"{self.high:,.0f}; trained with {self.batch:,.0f} {unit} an update"
        )
        yield ""
        yield f"{unit + ' an update':>24}{'updates':>10}{unit:>10}"
        for choice in self.choices:
            mark = "   as trained" if choice.batch == self.batch else ""
            yield f"{choice.batch:24,.0f}{choice.updates:9.2f}x{choice.targets:9.2f}x{mark}"
        yield ""
        yield self._words()
        yield (
            "It holds near this point of training, for a rate tuned to each batch, and grows as "
            "the loss falls (McCandlish et al. 2018)."
        )

    def _words(self) -> str:
        double = next(c for c in self.choices if c.batch == 2 * self.batch)
        saved, paid = 1 - double.updates, double.targets - 1
        cost = f"twice the batch saves {saved:.0%} of the updates and costs {paid:.0%} more "
        cost += self.unit
        if 2 * self.batch <= self.low:
            return f"Doubling still pays: {cost}."
        if self.batch >= self.high:
            return f"Doubling no longer pays: {cost}. Half the batch would do nearly as well."
        return f"Doubling is a trade: {cost}; the interval of the noise scale leaves it open."


def advise_batch(
    noise_scales: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    batch: float,
    *,
    unit: str = "targets",
) -> BatchAdvice:
    """Read advice on the batch off the noise scales of a run.

    Args:
        noise_scales: Estimates in the order of the updates; nan where there is none.
        lows: Lower ends of their intervals.
        highs: Upper ends; may be inf.
        batch: What an update was made of, in the same unit.
        unit: Of both.

    Raises:
        ValueError: No estimate is finite and positive.

    Example:
        >>> advice = advise_batch([1000.0], [800.0], [1300.0], 100.0)
        >>> double = advice.choices[3]
        >>> round(double.updates, 3), round(double.targets, 3)  # (1 + 5) / (1 + 10), 1.2 / 1.1
        (0.545, 1.091)

    Reference:
        McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162.
    """
    table = np.array([noise_scales, lows, highs], float)
    known = table[:, np.isfinite(table[0]) & (table[0] > 0)][:, -_NUM_RECENT:]
    if known.shape[1] == 0 or not batch > 0:
        raise ValueError(
            "the log holds no noise scale, so there is nothing to read a batch off. Train with "
            "`--observe`, or `observers=[ms.observers.NoiseScale()]`"
        )
    noise, low, high = (float(np.median(row)) for row in known)

    def choice(multiple: float) -> BatchChoice:
        other = multiple * batch
        return BatchChoice(
            other,
            (1 + noise / other) / (1 + noise / batch),
            (1 + other / noise) / (1 + batch / noise),
        )

    return BatchAdvice(
        batch=batch,
        noise_scale=noise,
        low=low if math.isfinite(low) else 0.0,
        high=high,
        unit=unit,
        choices=tuple(choice(multiple) for multiple in _MULTIPLES),
    )

"""Effective batch: what an update was really trained on, and what follows when it changes.

The product of nominal sizes is right only where every row is a target and every window is full.
Masks, short windows and uneven ranks make it another number, and the denominators of the records
are that number.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

__all__ = ["EffectiveBatch", "RateAdvice", "Scaling", "scaled_rate"]


class Record(Protocol):
    """What is read of an `UpdateRecord`."""

    @property
    def applied(self) -> bool:
        """Whether it changed the weights."""
        ...

    @property
    def denominators(self) -> Mapping[str, float]:
        """What each term's mean was over, in the window and over all ranks."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class EffectiveBatch:
    """What the applied updates of a run were over, beside what was meant.

    Attributes:
        nominal: Microbatch x accumulation x ranks (x length), as it was meant; None if unknown.
        mean: Targets of an applied update, on average.
        smallest: The fewest.
        largest: The most.
        num_updates: Applied updates.

    Example:
        >>> batch = EffectiveBatch.of_counts([512, 384, 500, 128], nominal=512)
        >>> print(batch)
        381 targets an update on average (128 to 512), 74.4 % of the nominal 512
    """

    nominal: float | None
    mean: float
    smallest: float
    largest: float
    num_updates: int

    @classmethod
    def of_counts(cls, counts: Iterable[float], *, nominal: float | None = None) -> EffectiveBatch:
        """Sum up the targets of each applied update.

        Args:
            counts: The denominators, over the window and all ranks.
            nominal: What was meant.

        Raises:
            ValueError: There is none.
        """
        found = list(counts)
        if not found:
            raise ValueError("No update was applied, so nothing was trained on.")
        return cls(nominal, math.fsum(found) / len(found), min(found), max(found), len(found))

    @classmethod
    def of_records(
        cls,
        records: Iterable[Record],
        *,
        term: str | None = None,
        nominal: float | None = None,
    ) -> EffectiveBatch:
        """Sum up the records of a run; only applied updates count.

        Args:
            records: Of the run.
            term: Of which loss term; None for the first.
            nominal: What was meant.

        Raises:
            ValueError: No update was applied.
        """
        counts = [
            record.denominators[term] if term else next(iter(record.denominators.values()), 0)
            for record in records
            if record.applied
        ]
        return cls.of_counts(counts, nominal=nominal)

    @property
    def share(self) -> float | None:
        """The mean over the nominal size; None when that is unknown."""
        return self.mean / self.nominal if self.nominal else None

    def __str__(self) -> str:
        words = (
            f"{round(self.mean, 1):,.10g} targets an update on average "
            f"({self.smallest:,.10g} to {self.largest:,.10g})"
        )
        if self.share is None:
            return words
        return f"{words}, {100 * self.share:.3g} % of the nominal {self.nominal:,.10g}"


class Scaling(enum.Enum):
    """How a rate may follow the batch, and under which conditions that was found."""

    LINEAR = 1.0
    SQUARE_ROOT = 0.5

    @property
    def exponent(self) -> float:
        """Of the ratio of the batches."""
        return float(self.value)

    @property
    def condition(self) -> str:
        """Under which it was found."""
        if self is Scaling.LINEAR:
            return (
                "a result for SGD with momentum and a warm-up, up to batches of about 8,000 images "
                "(Goyal et al. 2017, arXiv:1706.02677); beyond a critical batch it fails"
            )
        return (
            "keeps the noise of an adaptive optimizer's step (Malladi et al. 2022, "
            "arXiv:2205.10287), with betas and epsilon scaled too; a starting point for a sweep"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RateAdvice:
    """A rate and a decay to begin a sweep with when the batch changes, and what they rest on.

    Attributes:
        scaling: The rule.
        lr: The rate it gives.
        decay: The decay that keeps the exponent over the same number of targets.
        exponent: The exponent that is kept.
        exponent_unchanged: What it would become if rate and decay stayed as they are.
    """

    scaling: Scaling
    lr: float
    decay: float
    exponent: float
    exponent_unchanged: float

    def __str__(self) -> str:
        name = self.scaling.name.lower().replace("_", "-")
        return (
            f"{name} scaling: rate {self.lr:.3g}, decay {self.decay:.3g} keeps the exponent "
            f"{self.exponent:.3g} (left alone, rate and decay give {self.exponent_unchanged:.3g}). "
            f"Condition: {self.scaling.condition}."
        )


def scaled_rate(
    scaling: Scaling,
    *,
    lr: float,
    decay: float,
    batch: float,
    new_batch: float,
    num_updates: int,
) -> RateAdvice:
    """Advise on rate and decay when each update is over another number of targets.

        new rate    = rate * (new batch / batch) ^ (1 or 1/2)
        new updates = updates * batch / new batch          for the same number of targets
        new decay   = decay * (rate * updates) / (new rate * new updates)

    Args:
        scaling: The rule.
        lr: The mean rate over the updates.
        decay: The weight decay.
        batch: Targets an update, measured.
        new_batch: What they will be.
        num_updates: Applied updates of the whole run at `batch`.

    Raises:
        ValueError: A number is not greater than 0.

    Example:
        >>> advice = scaled_rate(
        ...     Scaling.LINEAR, lr=0.1, decay=1e-4, batch=256, new_batch=512, num_updates=1000)
        >>> advice.lr, advice.decay, advice.exponent_unchanged / advice.exponent
        (0.2, 0.0001, 0.5)
    """
    for name, value in (("lr", lr), ("batch", batch), ("new_batch", new_batch)):
        if not value > 0:
            raise ValueError(f"`scaled_rate({name}={value})`: must be greater than 0.")
    ratio = new_batch / batch
    new_lr = lr * ratio**scaling.exponent
    return RateAdvice(
        scaling=scaling,
        lr=new_lr,
        decay=decay * lr * ratio / new_lr,
        exponent=lr * decay * num_updates,
        exponent_unchanged=lr * decay * num_updates / ratio,
    )

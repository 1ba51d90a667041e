"""Weights: what each microbatch of a window counted for, against what it should have.

For one term of the loss, `share` is the weight of a microbatch as a whole and `count` what its mean
is over. The law says `share = count / sum of counts`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..events import Backward, Factor, Term
from ..history import History, Update
from .making import close

__all__ = ["Part", "parts_of", "same_route"]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One term of a loss over the microbatches of a window.

    Attributes:
        counts: What the mean of each microbatch is over; nan where unknown.
        shares: The weight each had.
        terms: The reductions.
        ratio: What the gradients were multiplied by, by hand, before the step.
        has_own_mean: Whether each microbatch is divided by its own count.
        factors: The constants each was multiplied by, but for its own count and the loss scale.
    """

    counts: tuple[float, ...]
    shares: tuple[float, ...]
    terms: tuple[Term, ...]
    ratio: float
    has_own_mean: bool
    factors: tuple[tuple[Factor, ...], ...]

    @property
    def total(self) -> float:
        """The weight of all microbatches together: 1 where a mean was meant."""
        return sum(self.shares)

    @property
    def size(self) -> int:
        """Number of microbatches."""
        return len(self.shares)

    @property
    def has_equal_shares(self) -> bool:
        """Whether every microbatch weighed the same."""
        return all(close(share, self.shares[0]) for share in self.shares) and self.shares[0] != 0

    @property
    def divisor(self) -> float:
        """The whole number of at least 2 that every loss was divided by; nan if there is none."""
        for factor in self.factors[0]:
            if factor.value and close(1 / factor.value, round(1 / factor.value), 1e-6):
                number = round(1 / factor.value)
                if number >= 2 and all(_has(factors, number) for factors in self.factors):
                    return float(number)
        return math.nan

    def divides_by(self, number: float) -> int:
        """How often the first loss was divided by a number, or multiplied by its inverse."""
        return sum(close(factor.value * number, 1.0, 1e-5) for factor in self.factors[0])


def _has(factors: Sequence[Factor], number: float) -> bool:
    return any(close(factor.value * number, 1.0, 1e-5) for factor in factors)


def same_route(backwards: Sequence[Backward]) -> bool:
    """Whether backwards came from the same lines, for the same parameters: one loop's turns."""
    first = backwards[0]
    return all(b.route == first.route and b.params == first.params for b in backwards)


def parts_of(history: History, update: Update) -> list[Part]:
    """Return the terms of a window whose weights are known, the same in every microbatch."""
    backwards = [backward for _, backward in update.backwards]
    if not backwards or not same_route(backwards):
        return []
    first = backwards[0].terms
    if any([t.kind for t in b.terms] != [t.kind for t in first] for b in backwards):
        return []
    ratio = history.ratio_of(update)
    parts = []
    for place in range(len(first)):
        terms = [b.terms[place] for b in backwards]
        scales = [b.scale for b in backwards]
        part = _part(terms, scales, 1.0 if math.isnan(ratio) else ratio)
        if part is not None and not math.isnan(ratio):
            parts.append(part)
    return parts


def _part(terms: Sequence[Term], scales: Sequence[float], ratio: float) -> Part | None:
    if not all(term.is_linear for term in terms):
        return None
    factors = [
        tuple(f for f in term.factors if f.value != 1.0 and not close(f.value, scale, 1e-6))
        for term, scale in zip(terms, scales, strict=True)
    ]
    own = [_own_division(term) for term in terms]
    has_own_mean = all(term.is_mean for term in terms) or all(f is not None for f in own)
    if not terms[0].is_mean and has_own_mean:
        factors = [
            tuple(f for f in some if f is not mine) for some, mine in zip(factors, own, strict=True)
        ]
    shares = []
    for term, scale in zip(terms, scales, strict=True):
        weight = term.weight / scale * ratio
        shares.append(weight if term.is_mean else weight * term.count)
    if not all(map(math.isfinite, shares)):
        return None
    counts = tuple(term.count for term in terms)
    return Part(counts, tuple(shares), tuple(terms), ratio, has_own_mean, tuple(factors))


def _own_division(term: Term) -> Factor | None:
    """The factor that turns a sum into the mean over its own count."""
    if term.is_mean or not term.count > 0:
        return None
    for factor in term.factors:
        if factor.is_division and close(factor.value * term.count, 1.0, 1e-5):
            return factor
    return None

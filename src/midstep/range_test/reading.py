"""Reading: bounds with intervals from one curve or several, or the answer that there are none."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .bounds import MIN_POINTS, CeilingKind, Indices, Outcome, find_bounds
from .smoothing import Floats, LocalLine

__all__ = ["Bound", "Confidence", "Curve", "Reading", "read_curves"]

_NUM_DRAWS = 200
_BLOCK = 5  # neighbours drawn together, because neighbours resemble each other
_BOUNDS = ("lower", "steepest", "upper", "ceiling")


class Confidence(enum.StrEnum):
    """How far to trust a reading.

    `HIGH`: a fall of at least 10 standard errors, lower and upper known to half a decade, a ceiling
    that was seen, fewer than 5 % of redrawn curves without a fall, and a range of at least a factor
    of 3. `MEDIUM`: known to a decade, fewer than 20 %. `LOW`: less. `NONE`: there are no bounds.
    """

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """One rate, with the interval that four of five redrawn curves fall into.

    Attributes:
        lr: The rate.
        low: Lower end of the interval, the 10 % quantile.
        high: Upper end, the 90 % quantile.
    """

    lr: float
    low: float
    high: float

    @property
    def decades(self) -> float:
        """Width of the interval."""
        return math.log10(self.high / self.low)


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Losses over rising rates, as a sweep made them.

    Attributes:
        lr: The rate of each point, rising by one factor. Shape [num_points].
        loss_mean: The loss of the update made at it; the last may be inf or nan.

    Raises:
        ValueError: Lengths differ, or the rates do not rise.
    """

    lr: Sequence[float]
    loss_mean: Sequence[float]

    def __post_init__(self) -> None:
        rates = np.asarray(self.lr, float)
        if len(self.lr) != len(self.loss_mean):
            raise ValueError(
                f"`Curve` of {len(self.lr)} rates and {len(self.loss_mean)} losses: each loss is "
                "that of the update made at its rate. Give as many of the one as of the other."
            )
        if not (np.all(rates > 0) and np.all(np.diff(rates) > 0)):
            raise ValueError(
                "`Curve(lr=...)`: the rates must be positive and rise from point to point, since a "
                "bound is a place on the way up."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a range test says: a search interval of rates, not an optimum.

    Attributes:
        outcome: Whether the loss fell, and if not, what happened instead.
        lower: Below it the rate hardly matters: a tenth of the fall is done. For the floor of a
            cycle, or the start of a warm-up.
        steepest: Where the loss falls fastest.
        upper: Where nine tenths of the fall are done, at most half the ceiling. For the peak of a
            cosine or one-cycle schedule; a constant rate lies between steepest and upper.
        ceiling: Above it the run rises or breaks. None when that was not seen.
        ceiling_kind: How it ended.
        confidence: In a word; the intervals say more.
        num_curves: Sweeps behind it.
        smooth: Each curve without its noise, for pictures.
    """

    outcome: Outcome
    lower: Bound | None = None
    steepest: Bound | None = None
    upper: Bound | None = None
    ceiling: Bound | None = None
    ceiling_kind: CeilingKind | None = None
    confidence: Confidence = Confidence.NONE
    num_curves: int = 1
    smooth: tuple[tuple[float, ...], ...] = ()

    def to_json(self) -> str:
        """Give the reading as one line of JSON; a bound that was not found is null."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Give the reading as plain values, without the curves."""
        values = dataclasses.asdict(self)
        del values["smooth"]
        return values

    def __str__(self) -> str:
        if self.outcome is not Outcome.DESCENT:
            return _WITHOUT[self.outcome] + self._ceiling_words()
        rows = [f"{name:9} {_spell(getattr(self, name))}" for name in _BOUNDS]
        ending = "" if self.ceiling_kind is None else _CEILINGS[self.ceiling_kind]
        return "\n".join([*rows, f"confidence {self.confidence}{ending}"])

    def _ceiling_words(self) -> str:
        return "" if self.ceiling is None else f" The ceiling is at most {self.ceiling.lr:.3g}."


_WITHOUT = {
    Outcome.NO_DESCENT: (
        "no descent: the loss did not fall by more than its own noise at any rate, so there are no "
        "bounds. Try larger rates, more points, or larger windows."
    ),
    Outcome.NO_DESCENT_THEN_DIVERGED: (
        "no descent: the run broke before the loss had fallen by more than its own noise. Try more "
        "points below that, or larger windows."
    ),
    Outcome.DIVERGED_FROM_START: (
        "diverged from the start: the loss rose at the smallest rates already. Start lower."
    ),
    Outcome.TOO_SHORT: (
        "too short: fewer than 12 points before the run broke say nothing. Start lower, or take "
        "more points."
    ),
}
_CEILINGS = {
    CeilingKind.RISE: "",
    CeilingKind.NONFINITE: "; the run broke without warning, so the true ceiling may be lower",
    CeilingKind.CENSORED: "; no ceiling was seen up to the last rate",
}


def _spell(bound: Bound | None) -> str:
    if bound is None:
        return "not seen"
    return f"{bound.lr:.2e}   80 % within {bound.low:.1e} .. {bound.high:.1e}"


def read_curves(curves: Sequence[Curve], *, seed: int = 0) -> Reading:
    """Read bounds off range-test curves, or find that they have none.

    A fall counts only when it is 5 of its own standard errors, noise and its memory from one point
    to the next included; so a flat curve gives no bounds. No rule is a ratio of losses, so that
    they may be negative, bounded, or shifted. Several curves are read each by itself, and the
    median of each bound on the scale of exponents is given. Costs about 0.1 s a curve.

    Args:
        curves: Of sweeps over the same rates, with other data each.
        seed: Of the redrawn curves behind the intervals.

    Example:
        >>> lr = np.geomspace(1e-6, 10, 100)
        >>> x = np.log10(lr)
        >>> loss = 2 - 1 / (1 + np.exp(-3 * (x + 3))) + np.exp(8 * (x - 0.3))
        >>> reading = read_curves([Curve(lr, loss)])
        >>> reading.outcome, 1e-4 < reading.lower.lr < 3e-4, reading.ceiling_kind
        (<Outcome.DESCENT: 'descent'>, True, <CeilingKind.RISE: 'rise'>)
    """
    readings = [
        _read(curve, np.random.default_rng([seed, index])) for index, curve in enumerate(curves)
    ]
    return readings[0] if len(readings) == 1 else _median(readings)


def _read(curve: Curve, random: np.random.Generator) -> Reading:
    lr, loss = np.asarray(curve.lr, float), np.asarray(curve.loss_mean, float)
    broken = np.flatnonzero(~np.isfinite(loss))
    num = int(broken[0]) if len(broken) else len(loss)
    lr, loss, is_broken = lr[:num], loss[:num], len(broken) > 0
    if num < MIN_POINTS:
        return Reading(outcome=Outcome.TOO_SHORT, smooth=((),))
    line = LocalLine(num, max(3, round(0.06 * num)))
    found = find_bounds(lr, loss, is_broken=is_broken, line=line)
    smooth = (tuple(found.smooth.tolist()),)
    if found.outcome is not Outcome.DESCENT:
        ceiling = None if found.ceiling is None else Bound(*[float(lr[found.ceiling])] * 3)
        return Reading(
            outcome=found.outcome,
            ceiling=ceiling,
            ceiling_kind=found.ceiling_kind,
            smooth=smooth,
        )
    draws = [
        find_bounds(lr, drawn, is_broken=is_broken, line=line)
        for drawn in _redrawn(loss, found, random)
    ]
    bounds = {name: _bound(lr, found, draws, name) for name in _BOUNDS}
    share = sum(draw.outcome is not Outcome.DESCENT for draw in draws) / len(draws)
    return Reading(
        outcome=found.outcome,
        ceiling_kind=found.ceiling_kind,
        confidence=_confidence(bounds, found, share),
        smooth=smooth,
        lower=bounds["lower"],
        steepest=bounds["steepest"],
        upper=bounds["upper"],
        ceiling=bounds["ceiling"],
    )


def _redrawn(loss: Floats, found: Indices, random: np.random.Generator) -> list[Floats]:
    """Draw the noise of the curve anew, in blocks of neighbours, up to where it broke."""
    end = len(loss) if found.ceiling is None else found.ceiling + 1
    noise = loss[:end] - found.smooth[:end]
    starts = random.integers(0, end - _BLOCK + 1, (_NUM_DRAWS, -(-end // _BLOCK)))
    drawn = noise[(starts[..., None] + np.arange(_BLOCK)).reshape(_NUM_DRAWS, -1)[:, :end]]
    tail = np.broadcast_to(loss[end:], (_NUM_DRAWS, len(loss) - end))
    return list(np.concatenate([found.smooth[:end] + drawn, tail], axis=1))


def _bound(lr: Floats, found: Indices, draws: Sequence[Indices], name: str) -> Bound | None:
    index = getattr(found, name)
    if index is None:
        return None
    at = [getattr(draw, name) for draw in draws]
    exponents = np.log10(lr[[i for i in at if i is not None] or [index]])
    low, high = 10 ** np.quantile(exponents, [0.1, 0.9])
    value = float(lr[index])
    return Bound(value, min(value, float(low)), max(value, float(high)))


def _confidence(bounds: dict[str, Bound | None], found: Indices, share_flat: float) -> Confidence:
    lower, upper = bounds["lower"], bounds["upper"]
    assert lower is not None
    assert upper is not None
    widest = max(lower.decades, upper.decades)
    is_seen = found.ceiling_kind is not CeilingKind.CENSORED
    is_wide = upper.lr / lower.lr >= 3
    if found.num_sigmas >= 10 and widest <= 0.5 and is_seen and share_flat < 0.05 and is_wide:
        return Confidence.HIGH
    if widest <= 1.0 and share_flat < 0.2:
        return Confidence.MEDIUM
    return Confidence.LOW


def _median(readings: Sequence[Reading]) -> Reading:
    """Join readings: the outcome of most, and the median of each bound."""
    outcomes = [reading.outcome for reading in readings]
    outcome = max(outcomes, key=lambda o: (outcomes.count(o), o is not Outcome.DESCENT))
    agreeing = [reading for reading in readings if reading.outcome is outcome]
    bounds = {name: _middle([getattr(reading, name) for reading in agreeing]) for name in _BOUNDS}
    order = list(Confidence)
    confidence = order[max(order.index(reading.confidence) for reading in agreeing)]
    if len(agreeing) < len(readings) and confidence is Confidence.HIGH:
        confidence = Confidence.MEDIUM
    kinds = [reading.ceiling_kind for reading in agreeing]
    return Reading(
        outcome=outcome,
        ceiling_kind=max(kinds, key=kinds.count),
        confidence=confidence,
        num_curves=len(readings),
        smooth=tuple(curve for reading in readings for curve in reading.smooth),
        lower=bounds["lower"],
        steepest=bounds["steepest"],
        upper=bounds["upper"],
        ceiling=bounds["ceiling"],
    )


def _middle(bounds: Sequence[Bound | None]) -> Bound | None:
    """Give the median on the scale of exponents, and an interval that holds every value read."""
    found = [bound for bound in bounds if bound is not None]
    if len(found) * 2 <= len(bounds):
        return None
    lr, low, high = (
        10 ** float(np.median([math.log10(getattr(bound, end)) for bound in found]))
        for end in ("lr", "low", "high")
    )
    values = [bound.lr for bound in found]
    return Bound(lr, min(low, *values), max(high, *values))

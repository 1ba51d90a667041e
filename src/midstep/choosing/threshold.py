"""Thresholds: what any of them would have clipped in a run, and what other rules would have done.

Everything here is read off norms before clipping. What a threshold does to the training itself, no
log of another run can tell: a run that is clipped otherwise takes other steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..clip import (
    ByGlobalNorm,
    ByQuantile,
    ByTensorAverage,
    ByTensorNorm,
    ByZScore,
    Chain,
    SkipSpike,
)
from ..clip.rule import Attempt, Rule
from ..errors import MidstepError
from ..gradients import Gradients

__all__ = ["Shadow", "ThresholdAdvice", "advise_threshold", "shadow", "usual_rules"]

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
_MIN_NORMS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdAdvice:
    """What the norms of a run say about thresholds.

    Attributes:
        num_norms: Finite norms before clipping, of applied updates.
        num_nonfinite: Norms that were inf or nan; they belong to no quantile.
        quantiles: Share of updates to norm: a threshold there lets that share pass.
        drift: Median norm of the last third over that of the first.
        outliers: Norms above 6 robust deviations over the median, as a share.
    """

    num_norms: int
    num_nonfinite: int
    quantiles: dict[float, float]
    drift: float
    outliers: float

    def share_above(self, norms: Sequence[float], threshold: float) -> float:
        """Give the share of norms that a threshold would have clipped."""
        finite = [norm for norm in norms if math.isfinite(norm)]
        return sum(norm > threshold for norm in finite) / len(finite)

    def words(self) -> list[str]:
        """Say what follows, and under which conditions."""
        most, nearly_all = self.quantiles[0.9], self.quantiles[0.99]
        first = f"A threshold of {most:.3g} would have clipped 10 % of these updates, one of "
        lines = [f"{first}{nearly_all:.3g} 1 %, one of {self.quantiles[0.5]:.3g} every second."]
        if not 0.5 <= self.drift <= 2.0:
            way = "grew" if self.drift > 1 else "shrank"
            lines.append(
                f"The norm {way} by a factor of {max(self.drift, 1 / self.drift):.1f} over the "
                "run, so one number is right for a part of it only: a threshold that follows a "
                "schedule, or `ByQuantile`, moves along."
            )
        elif self.outliers > 0:  # of a norm that drifts, the early ones would be called so
            lines.append(
                f"{self.outliers:.2%} of the norms stand apart from the rest. A threshold at "
                f"{nearly_all:.3g} shrinks the largest and leaves the others alone; `SkipSpike` "
                "leaves such updates out."
            )
        lines.append(
            "These are the norms of this run, clipped as it was; under another threshold it takes "
            "other steps. `midstep compare RECIPE --vary clip=...` shows what that does."
        )
        return lines


def advise_threshold(norms: Sequence[float]) -> ThresholdAdvice:
    """Read quantiles, drift and outliers off norms before clipping.

    Args:
        norms: Of applied updates, in their order.

    Raises:
        ValueError: Fewer than 20 are finite, or all are 0.

    Example:
        >>> advice = advise_threshold([float(n) for n in range(1, 102)])
        >>> advice.quantiles[0.5], advice.quantiles[0.9]
        (51.0, 91.0)
    """
    values = np.asarray(norms, float)
    finite = values[np.isfinite(values)]
    if len(finite) < _MIN_NORMS:
        raise ValueError(
            f"{len(finite)} finite norms before clipping, of {len(values)}: fewer than "
            f"{_MIN_NORMS} say nothing about a threshold. Train longer"
        )
    if not finite.max() > 0:
        raise ValueError(
            f"all {len(finite)} norms are 0: no gradient reached the parameters, and no threshold "
            "would have clipped anything. Look for frozen parameters or a masked loss"
        )
    third = max(1, len(finite) // 3)
    first, last = (float(np.median(part)) for part in (finite[:third], finite[-third:]))
    middle = float(np.median(finite))
    spread = 1.4826 * float(np.median(np.abs(finite - middle)))
    return ThresholdAdvice(
        num_norms=len(finite),
        num_nonfinite=len(values) - len(finite),
        quantiles={q: float(np.quantile(finite, q)) for q in QUANTILES},
        drift=last / first if first > 0 else math.inf,
        outliers=float(np.mean(finite > middle + 6 * spread)) if spread > 0 else 0.0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """What a rule would have done to the gradients of a run.

    Attributes:
        rule: As it is written.
        clipped: Share of updates it would have clipped.
        mean_coefficient: Mean of norm after over norm before.
        least_coefficient: The hardest clip.
        num_skipped: Updates it would have left out.
        ended: The update at which it would have ended the run with an error; None for none.
        thresholds: What each update was held against; nan where there is no one number.
    """

    rule: str
    clipped: float
    mean_coefficient: float
    least_coefficient: float
    num_skipped: int
    ended: int | None
    thresholds: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain values, without the thresholds."""
        values = dataclasses.asdict(self)
        del values["thresholds"]
        return values


def shadow(
    rule: Rule,
    norms: Sequence[float],
    losses: Sequence[float] | None = None,
    *,
    tensor_norms: Sequence[Sequence[float]] | None = None,
) -> Shadow:
    """Have a rule decide on every recorded gradient, without running anything again.

    The rule itself decides, on stand-ins that have the recorded norms. A rule that looks at single
    tensors needs their norms; one that looks at entries or weights, such as `Adaptive`, cannot be
    told from norms at all. Updates that were not finite reach no rule, and are passed over.

    Args:
        rule: Freshly made; it is used up.
        norms: Before clipping, in the order of the updates. Shape [num_updates].
        losses: Mean losses, for rules that look at them. Shape [num_updates].
        tensor_norms: Norm of each tensor. Shape [num_updates, num_tensors].

    Example:
        >>> shadow(ByGlobalNorm(2.0), [1.0, 4.0]).least_coefficient
        0.5
    """
    num_tensors = len(tensor_norms[0]) if tensor_norms else 1
    stand_ins = [
        torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(num_tensors)
    ]
    coefficients, thresholds = [], []
    clipped = skipped = in_a_row = step = 0
    ended = None
    for index, norm in enumerate(norms):
        if not math.isfinite(norm):
            continue
        for parameter, value in zip(
            stand_ins, tensor_norms[index] if tensor_norms else [norm], strict=True
        ):
            parameter.grad = torch.tensor([value], dtype=torch.float64)
        loss = None if losses is None else losses[index]
        attempt = Attempt(step, loss, skipped_in_a_row=in_a_row)
        try:
            decision = rule.decide(Gradients(stand_ins), attempt)
        except MidstepError:
            ended = index + 1
            break
        thresholds.append(math.nan if decision.threshold is None else decision.threshold)
        if decision.skip:
            skipped, in_a_row = skipped + 1, in_a_row + 1
            continue
        rule.commit(decision)
        step, in_a_row = step + 1, 0
        clipped += decision.clipped
        coefficients.append(1.0 if decision.coefficient is None else decision.coefficient)
    return Shadow(
        rule=repr(rule),
        clipped=clipped / max(1, len(coefficients)),
        mean_coefficient=float(np.mean(coefficients)) if coefficients else 1.0,
        least_coefficient=min(coefficients, default=1.0),
        num_skipped=skipped,
        ended=ended,
        thresholds=tuple(thresholds),
    )


def usual_rules(advice: ThresholdAdvice, *, has_tensors: bool) -> list[Rule]:
    """Give the rules that are worth a look: fixed thresholds, and those that find their own.

    Args:
        advice: Whose quantiles become fixed thresholds.
        has_tensors: Whether the norm of each tensor is known.
    """
    fixed = sorted({float(f"{advice.quantiles[q]:.3g}") for q in (0.5, 0.9, 0.99)} - {0.0})
    rules: list[Rule] = [
        *(ByGlobalNorm(norm) for norm in fixed),
        ByQuantile(0.9, cap=math.inf),
        ByQuantile(0.99, cap=math.inf),
        ByZScore(cap=math.inf),
        SkipSpike(),
        Chain(SkipSpike(), ByQuantile(0.9, cap=math.inf)),
    ]
    if has_tensors:
        rules += [*(ByTensorNorm(norm) for norm in fixed[:1]), ByTensorAverage(cap=math.inf)]
    return rules

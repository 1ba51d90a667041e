"""Skipping updates that stand out: no step at all, rather than a shorter one."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MidstepError
from ..gradients import Gradients
from .checks import check_between, check_count
from .rule import Attempt, Decision, MeasuresLength

__all__ = ["SkipSpike"]

# The median absolute deviation of a normal distribution is 0.6745 of its standard deviation.
_MAD_TO_SIGMA = 1.4826
# A history without any spread must not turn the next digit into a spike.
_LEAST_SPREAD = 0.01


@dataclasses.dataclass(slots=True)
class _Memory:
    """Norms and mean losses of the latest applied updates."""

    norms: collections.deque[float]
    losses: collections.deque[float]


@dataclasses.dataclass(frozen=True, slots=True)
class SkipSpike(MeasuresLength):
    r"""Skip the update when its gradient norm or its mean loss stands out from those before.

        skip when x > median + sigma * spread,   spread = 1.4826 * median(|x_i - median|)

    over the last `window` applied updates, for x the norm and for x the loss; from half a window
    on. The spread counts as at least 1 % of the median. Median and deviation do not move for one
    outlier, and a skipped update is not remembered, so a second spike is seen like the first. The
    update ends *skipped*: no step, no schedule tick, no trace. A loss that is not finite is a spike
    too, where the gradient is. Changes no gradient; put it first in a `Chain`.

    A norm or loss that has moved for good would be skipped for ever, so after `max_consecutive`
    skips in a row the next one is an error. Costs nothing beside the norm.

    Attributes:
        sigma: Standard deviations above the median that are let pass, as estimated from the median
            absolute deviation.
        window: How many updates are remembered; at least 4.
        max_consecutive: How many updates in a row may be skipped, for whatever reason.

    Raises:
        ValueError: `sigma` is not greater than 0, `window` is less than 4, or `max_consecutive` is
            less than 1.

    Example:
        >>> import torch
        >>> rule, weight = SkipSpike(window=4), torch.nn.Parameter(torch.zeros(1))
        >>> for norm in (1.0, 1.1, 1.0, 9.0):
        ...     weight.grad = torch.tensor([norm])
        ...     decision = rule.decide(Gradients([weight]), Attempt(step=0, loss_mean=2.0))
        ...     if not decision.skip:
        ...         rule.commit(decision)
        >>> decision.skip
        True

    Reference: PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) skips the data of a spike
    by hand; the median absolute deviation as a yardstick is Hampel 1974.
    """

    sigma: float = 6.0
    window: int = 128
    max_consecutive: int = 10
    _memory: _Memory = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_between("sigma", self.sigma, "SkipSpike", 0, why="it is a distance above the median")
        check_count("window", self.window, "SkipSpike", 4, why="fewer values have no spread")
        check_count(
            "max_consecutive",
            self.max_consecutive,
            "SkipSpike",
            1,
            why="otherwise the first spike is an error",
        )
        memory = _Memory(
            norms=collections.deque(maxlen=self.window),
            losses=collections.deque(maxlen=self.window),
        )
        object.__setattr__(self, "_memory", memory)

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Ask for a skip when norm or loss stands out.

        Raises:
            MidstepError: So many in a row were skipped that it is no spike any more.
        """
        norm, loss = gradients.norm(), attempt.loss_mean
        norm_limit, loss_limit = self._limit(self._memory.norms), self._limit(self._memory.losses)
        # Not `loss > loss_limit`: nan is greater than nothing.
        is_spike = norm > norm_limit or (
            loss is not None and loss_limit < math.inf and not loss <= loss_limit
        )
        if is_spike and attempt.skipped_in_a_row >= self.max_consecutive:
            raise MidstepError(
                f"{attempt.skipped_in_a_row} updates in a row were skipped and the next stands out "
                f"too: norm `{norm:.4g}` (limit `{norm_limit:.4g}`), loss `{loss}` (limit "
                f"`{loss_limit:.4g}`). That is no spike: training has diverged, or norm and loss "
                "have moved for good. Go back to an earlier checkpoint and leave this data out, or "
                f"raise `SkipSpike(sigma={self.sigma})`."
            )
        return Decision(
            clipped=False,
            skip=is_spike,
            threshold=norm_limit if norm_limit < math.inf else None,
            seen=(norm, loss),
        )

    def commit(self, decision: Decision) -> None:
        """Remember norm and loss."""
        norm, loss = decision.seen
        self._memory.norms.append(norm)
        if loss is not None and math.isfinite(loss):
            self._memory.losses.append(float(loss))

    def _limit(self, values: Sequence[float]) -> float:
        if 2 * len(values) < self.window:
            return math.inf
        median = statistics.median(values)
        spread = _MAD_TO_SIGMA * statistics.median(abs(v - median) for v in values)
        spread = max(spread, _LEAST_SPREAD * abs(median))
        # All zeros: nothing is known of how far a value may be from them.
        return median + self.sigma * spread if spread > 0.0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Give the remembered norms and losses, oldest first."""
        return {"norms": list(self._memory.norms), "losses": list(self._memory.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what an earlier run remembered; the latest, where it remembered more."""
        self._memory.norms.clear()
        self._memory.norms.extend(state["norms"])
        self._memory.losses.clear()
        self._memory.losses.extend(state["losses"])

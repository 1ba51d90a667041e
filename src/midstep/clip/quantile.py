"""Clipping at a quantile of the norms that came before."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..gradients import Gradients
from .checks import check_between, check_count
from .rule import (
    Attempt,
    Decision,
    MeasuresLength,
    Threshold,
    at_step,
    check_threshold,
    shrink_all,
)

__all__ = ["ByQuantile"]


@dataclasses.dataclass(frozen=True, slots=True)
class ByQuantile(MeasuresLength):
    r"""Clip by the global norm, at a quantile of the norms of earlier updates and at a fixed cap.

        g <- g * min(1, threshold / ||g||)
        threshold = min(cap, the q-quantile of the last `window` norms, before clipping)

    Finds by itself a threshold that lets the share q of updates pass. An update is held against the
    norms before it, never against its own. The norms that are remembered are unclipped ones, so the
    threshold follows the gradient up as well as down. A low q (0.1, as in the paper) clips almost
    always, which is a lower rate under another name. Costs nothing beside the norm.

    Attributes:
        q: Share of updates to let pass, between 0 and 1; between two norms it is interpolated.
        window: How many norms are remembered.
        warmup: How many norms the quantile needs; until then only the cap holds.
        cap: Bounds the norm at every step; a number, or a function of the number of applied
            updates. `math.inf` leaves the warm-up without protection.

    Raises:
        ValueError: `q` is not between 0 and 1, `window` is less than 1, `warmup` is not from 1 to
            `window`, or `cap` is not greater than 0.

    Example:
        >>> import torch
        >>> rule, weight = ByQuantile(q=0.5, warmup=3, cap=10.0), torch.nn.Parameter(torch.zeros(1))
        >>> for norm in (1.0, 3.0, 2.0, 8.0):
        ...     weight.grad = torch.tensor([norm])
        ...     decision = rule.decide(Gradients([weight]), Attempt(step=0))
        ...     rule.commit(decision)
        >>> decision.threshold, decision.coefficient  # the median of 1, 2 and 3
        (2.0, 0.25)

    Reference: Seetharaman, Wichern, Pardo & Le Roux 2020, arXiv:2007.14469 (AutoClip).
    """

    q: float = 0.9
    window: int = 1000
    warmup: int = 50
    cap: Threshold = 1.0
    _norms: collections.deque[float] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_between("q", self.q, "ByQuantile", 0, 1, why="it is a share of the updates")
        check_count("window", self.window, "ByQuantile", 1, why="norms must be remembered")
        check_count("warmup", self.warmup, "ByQuantile", 1, why="a quantile needs a norm")
        if self.warmup > self.window:
            raise ValueError(
                f"`ByQuantile(window={self.window}, warmup={self.warmup})`: so many norms are "
                "never remembered, so the quantile would never be used. Make `warmup` at most "
                "`window`."
            )
        check_threshold("cap", self.cap, "ByQuantile")
        object.__setattr__(self, "_norms", collections.deque(maxlen=self.window))

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink all gradients when their norm is greater than the quantile or the cap."""
        threshold = at_step("cap", self.cap, attempt.step, "ByQuantile")
        # Norms that were mostly zero say nothing about a gradient that is not.
        if len(self._norms) >= self.warmup and (found := quantile(self._norms, self.q)) > 0.0:
            threshold = min(threshold, found)
        return shrink_all(gradients, threshold, seen=gradients.norm())

    def commit(self, decision: Decision) -> None:
        """Remember the norm, as it was before clipping."""
        self._norms.append(decision.seen)

    def state_dict(self) -> dict[str, Any]:
        """Give the remembered norms, oldest first."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the norms that an earlier run remembered; the latest, where it remembered more."""
        self._norms.clear()
        self._norms.extend(state["norms"])


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, interpolated linearly between two values.

    Example:
        >>> quantile([4.0, 1.0, 2.0], 0.75)
        3.0
    """
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

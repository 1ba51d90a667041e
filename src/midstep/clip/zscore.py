"""Clipping at so many standard deviations above the running mean of the norm."""

from __future__ import annotations

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

__all__ = ["ByZScore"]


@dataclasses.dataclass(slots=True)
class _Memory:
    """The running moments of the norm.

    Attributes:
        warming: Norms of the warm-up, until there are enough.
        mean: None during the warm-up.
        variance: Of the norm about its running mean.
        rising: Norms of the latest updates in a row that were above the limit.
    """

    warming: list[float] = dataclasses.field(default_factory=list)
    mean: float | None = None
    variance: float = 0.0
    rising: list[float] = dataclasses.field(default_factory=list)

    def start(self, norms: Sequence[float]) -> None:
        """Take the moments of some norms for the running ones."""
        mean = math.fsum(norms) / len(norms)
        self.mean = mean
        self.variance = math.fsum((n - mean) ** 2 for n in norms) / len(norms)


@dataclasses.dataclass(frozen=True, slots=True)
class ByZScore(MeasuresLength):
    r"""Clip by the global norm, where it stands out from its own running mean, and at a fixed cap.

        g <- g * min(1, threshold / ||g||),   threshold = min(cap, mean + z * sqrt(variance))
        mean     <- beta * mean + (1 - beta) * x
        variance <- beta * variance + (1 - beta) * (x - mean)^2,   x = min(||g||, mean + z * ...)

    The moments take the norm as the limit left it, not the cap. A limit that only sees what it let
    pass can lock in: after a lasting rise of the norm it clips every update. So once `patience`
    updates in a row were above it, the rise counts as the new level, and the moments start again
    from the raw norms of those updates. Costs nothing beside the norm.

    Attributes:
        z: Standard deviations above the mean that are let pass.
        beta: Share of the old moments that each update keeps, between 0 and 1.
        warmup: How many norms make the first moments; until then only the cap holds.
        cap: Bounds the norm at every step; a number, or a function of the number of applied
            updates. `math.inf` leaves the warm-up without protection.
        patience: After how many updates in a row above the limit it is set anew.

    Raises:
        ValueError: `z` or `cap` is not greater than 0, `beta` is not between 0 and 1, or `warmup`
            or `patience` is less than 2.

    Example:
        >>> import torch
        >>> rule, weight = ByZScore(warmup=2, cap=10.0), torch.nn.Parameter(torch.zeros(1))
        >>> for norm in (1.0, 2.0, 8.0):
        ...     weight.grad = torch.tensor([norm])
        ...     decision = rule.decide(Gradients([weight]), Attempt(step=0))
        ...     rule.commit(decision)
        >>> decision.threshold  # 1.5 + 2.5 * 0.5
        2.75

    Reference: Kumar, Owen, Chowdhury & Guera 2025, arXiv:2504.02507 (ZClip), whose default rule,
    which clips the harder the larger the norm, is the one that locks in.
    """

    z: float = 2.5
    beta: float = 0.97
    warmup: int = 25
    cap: Threshold = 1.0
    patience: int = 20
    _memory: _Memory = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=_Memory
    )

    def __post_init__(self) -> None:
        check_between("z", self.z, "ByZScore", 0, why="it is a distance above the mean")
        check_between("beta", self.beta, "ByZScore", 0, 1, why="it is the share that is kept")
        check_count("warmup", self.warmup, "ByZScore", 2, why="one norm has no variance")
        check_count("patience", self.patience, "ByZScore", 2, why="one norm has no variance")
        check_threshold("cap", self.cap, "ByZScore")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink all gradients when their norm is greater than the limit or the cap."""
        cap = at_step("cap", self.cap, attempt.step, "ByZScore")
        return shrink_all(gradients, min(cap, self._limit()), seen=gradients.norm())

    def commit(self, decision: Decision) -> None:
        """Move the moments by one norm; start them again when it has been above for too long."""
        memory, norm, limit = self._memory, float(decision.seen), self._limit()
        if memory.mean is None:
            memory.warming.append(norm)
            if len(memory.warming) >= self.warmup:
                memory.start(memory.warming)
                memory.warming.clear()
            return
        if norm > limit:
            memory.rising.append(norm)
            if len(memory.rising) >= self.patience:
                memory.start(memory.rising)
                memory.rising.clear()
                return
        else:
            memory.rising.clear()
        seen = min(norm, limit)
        memory.mean = self.beta * memory.mean + (1.0 - self.beta) * seen
        deviation = (seen - memory.mean) ** 2  # from the new mean, as in the reference
        memory.variance = self.beta * memory.variance + (1.0 - self.beta) * deviation

    def _limit(self) -> float:
        if self._memory.mean is None:
            return math.inf
        return self._memory.mean + self.z * math.sqrt(self._memory.variance)

    def state_dict(self) -> dict[str, Any]:
        """Give the moments, and the norms that new ones would be made of."""
        return dataclasses.asdict(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the moments of an earlier run."""
        self._memory.warming = list(state["warming"])
        self._memory.mean = state["mean"]
        self._memory.variance = state["variance"]
        self._memory.rising = list(state["rising"])

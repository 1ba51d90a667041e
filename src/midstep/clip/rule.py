"""What every clip rule is: it decides from the gradients, and remembers only what was applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..gradients import Gradients

__all__ = [
    "Attempt",
    "Decision",
    "DecidesUnread",
    "MeasuresLength",
    "Rule",
    "Stateless",
    "Threshold",
    "at_step",
    "check_order",
    "check_threshold",
    "shrink",
    "shrink_all",
    "shrink_each",
]

Threshold = float | Callable[[int], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """What a rule may know of the update besides its gradients.

    Attributes:
        step: Applied updates so far; what a threshold schedule is a function of.
        loss_mean: The mean loss of the window.
        lr: The rate of the first parameter group.
        skipped_in_a_row: Updates skipped since the last applied one, for whatever reason.
    """

    step: int
    loss_mean: float | None = None
    lr: float = 0.0
    skipped_in_a_row: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a rule decided on one update.

    Attributes:
        clipped: Whether it changed the gradients.
        coefficient: Norm after over norm before; None where clipping was not one number.
        skip: Whether the window should not be stepped on at all.
        threshold: The threshold this update was held against, where there is one.
        seen: What a rule with a memory takes from this update when it is applied.
    """

    clipped: bool
    coefficient: float | None = 1.0
    skip: bool = False
    threshold: float | None = None
    seen: Any = None


class Rule(Protocol):
    """Bounds the gradients of one update.

    It runs once a window, on finite, true gradients of the mean loss: after accumulation, unscaling
    and the sum over ranks. `decide` multiplies or edits the gradients and leaves the rule itself as
    it is; `commit` is called when the update was applied, and only then may a rule remember it.

    A rule that needs one number only, the norm of all gradients together, may have a method
    `decide_unread(norm, step)` for a norm that stays on its device: what to multiply by, and its
    threshold. With it an update needs no host sync.

    On several ranks norms cost a collective. A rule that asks for the norm of each tensor may say
    so (`needs_each = True`), and they travel with the total; else they take one more.
    """

    @property
    def p(self) -> float:
        """The order of the norm that the record shows."""
        ...

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Bound the gradients, and say what was done."""
        ...

    def commit(self, decision: Decision) -> None:
        """Remember an update that was applied."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Give what the rule remembers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what an earlier run remembered."""
        ...


def needs_each(rule: Rule) -> bool:
    """Whether a rule says that it asks for the norm of each tensor."""
    return bool(getattr(rule, "needs_each", False))


@runtime_checkable
class DecidesUnread(Protocol):
    """A rule that can decide on a norm that stays on its device."""

    @property
    def p(self) -> float:
        """The order of the norm."""
        ...

    def decide_unread(self, norm: Tensor, step: int) -> tuple[Tensor, float | None]:
        """What to multiply every gradient by, 1 to leave them; and the threshold, if any."""
        ...


class Stateless:
    """A rule that remembers nothing."""

    __slots__ = ()

    def commit(self, decision: Decision) -> None:
        """Remember nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Give nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


class MeasuresLength:
    """A rule whose record shows the L2 norm."""

    __slots__ = ()

    @property
    def p(self) -> float:
        """The order of the norm that the record shows."""
        return 2.0


def check_threshold(name: str, value: Threshold, rule: str) -> None:
    """Refuse a threshold that erases every gradient or bounds none.

    Raises:
        ValueError: It is not greater than 0.
        TypeError: It is neither a number nor a function of the step.
    """
    if callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"`{rule}({name}={value!r})`: must be a number, or a function from the number of "
            "applied updates to one."
        )
    if not value > 0:  # written so that nan fails too
        raise ValueError(
            f"`{rule}({name}={value!r})`: must be greater than 0, because 0 erases every gradient. "
            "To clip nothing, pass `clip=None` or `math.inf`."
        )


def at_step(name: str, value: Threshold, step: int, rule: str) -> float:
    """Evaluate a threshold that may follow a schedule."""
    if not callable(value):
        return value
    found = value(step)
    check_threshold(name, found, rule)
    return found


def shrink(norm: float, threshold: float) -> float:
    """The factor that brings a norm down to its threshold; 1 exactly when norm <= threshold.

    No epsilon: torch adds 1e-6 to the norm and lands slightly below the threshold, also for a norm
    that is exactly on it.

    Example:
        >>> shrink(4.0, 1.0), shrink(1.0, 1.0), shrink(0.0, 1.0)
        (0.25, 1.0, 1.0)
    """
    return threshold / norm if norm > threshold else 1.0


def shrink_all(
    gradients: Gradients, threshold: float, *, p: float = 2.0, seen: object = None
) -> Decision:
    """Bring the norm of all gradients down to a threshold, and say so."""
    coefficient = shrink(gradients.norm(p), threshold)
    if coefficient != 1.0:
        gradients.mul_(coefficient)
    return Decision(
        clipped=coefficient != 1.0, coefficient=coefficient, threshold=threshold, seen=seen
    )


def shrink_each(
    gradients: Gradients, factors: Sequence[float], *, p: float, threshold: float | None = None
) -> Decision:
    """Give each gradient its own factor, and say what became of the norm of order p."""
    if all(factor == 1.0 for factor in factors):
        return Decision(clipped=False, threshold=threshold)
    before = gradients.norm(p)
    gradients.mul_each_(factors)
    return Decision(clipped=True, coefficient=gradients.norm(p) / before, threshold=threshold)


def check_order(p: float, rule: str) -> None:
    """Refuse an order that makes no norm.

    Raises:
        ValueError: It is not greater than 0.
    """
    if not p > 0:  # written so that nan fails too
        raise ValueError(
            f"`{rule}(p={p!r})`: the order of a norm must be greater than 0; 2 is the length of "
            "the gradient, inf its largest entry."
        )

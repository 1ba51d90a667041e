"""Clipping by value: every entry on its own."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ..gradients import Gradients
from .rule import Attempt, Decision, Stateless, Threshold, at_step, check_threshold

__all__ = ["ByValue", "clamp_"]


@dataclasses.dataclass(frozen=True, slots=True)
class ByValue(Stateless):
    r"""Bound every entry of every gradient; this changes the direction of the step.

        g <- min(max(g, -max_value), max_value), entry by entry

    For g = (3, 4) and a bound of 1, norm clipping gives (0.6, 0.8) and value clipping (1, 1), which is
    another direction. Choose it when a bound on coordinates is meant. It would also turn an infinite
    entry into a finite one, so it runs after the finite check, never instead of it. Costs a read for
    the largest entry, and when an entry is over the bound two passes more.

    Attributes:
        max_value: Of one entry, real and imaginary part apart; a number, or a function of the number
            of applied updates.

    Raises:
        ValueError: `max_value` is not greater than 0.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> ByValue(1.0).decide(Gradients([weight]), Attempt(step=0)).clipped, weight.grad
        (True, tensor([1., 1.]))
    """

    max_value: Threshold

    @property
    def p(self) -> float:
        """The record shows the L2 norm."""
        return 2.0

    def __post_init__(self) -> None:
        check_threshold("max_value", self.max_value, "ByValue")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Clamp every entry when any is over the bound."""
        bound = at_step("max_value", self.max_value, attempt.step, "ByValue")
        # A complex entry has the modulus of both parts, so this may only err towards clamping.
        if gradients.norm(math.inf) <= bound:
            return Decision(clipped=False, threshold=bound)
        gradients.edit_(lambda tensors: clamp_(tensors, bound))
        return Decision(clipped=True, coefficient=None, threshold=bound)


def clamp_(tensors: list[Tensor], bound: float) -> None:
    """Clamp every entry of every tensor, real and imaginary part apart."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    torch._foreach_clamp_min_(real, -bound)
    torch._foreach_clamp_max_(real, bound)

"""Clipping by value: every entry on its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..gradients import Gradients, tensor_norms
from .rule import (
    Attempt,
    Decision,
    MeasuresLength,
    Stateless,
    Threshold,
    at_step,
    check_threshold,
)

__all__ = ["ByValue", "clamp_"]


@dataclasses.dataclass(frozen=True, slots=True)
class ByValue(MeasuresLength, Stateless):
    r"""Bound every entry of every gradient; this changes the direction of the step.

        g <- min(max(g, -max_value), max_value), entry by entry

    For g = (3, 4) and a bound of 1, norm clipping gives (0.6, 0.8) and value clipping (1, 1), which
    is another direction. Choose it when a bound on coordinates is meant. It would also turn an
    infinite entry into a finite one, so it runs after the finite check, never instead of it. Costs
    a read for the largest entry, and when one is over the bound two passes more, and one for a
    pending factor.

    Attributes:
        max_value: Of one entry, real and imaginary part apart; a number, or a function of the
            number of applied updates. Rounded to the dtype of each gradient.

    Raises:
        ValueError: `max_value` is not greater than 0.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> ByValue(1.0).decide(Gradients([weight]), Attempt(step=0)).clipped, weight.grad
        (True, tensor([1., 1.]))
    """

    max_value: Threshold

    def __post_init__(self) -> None:
        check_threshold("max_value", self.max_value, "ByValue")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Clamp every entry when any is over the bound."""
        bound = at_step("max_value", self.max_value, attempt.step, "ByValue")
        over = [
            norm > bound
            and (not tensor.is_complex() or _largest_part(tensor) * abs(factor) > bound)
            for tensor, norm, factor in zip(
                gradients.tensors, gradients.norms(math.inf), gradients.factors, strict=True
            )
        ]
        if not any(over):
            return Decision(clipped=False, threshold=bound)
        gradients.edit_(
            lambda tensors: clamp_([t for t, o in zip(tensors, over, strict=True) if o], bound)
        )
        return Decision(clipped=True, coefficient=None, threshold=bound)


def clamp_(tensors: Sequence[Tensor], bound: float) -> None:
    """Clamp every entry of every tensor, real and imaginary part apart; a nan stays a nan."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    torch._foreach_clamp_min_(real, -bound)
    torch._foreach_clamp_max_(real, bound)


def _largest_part(tensor: Tensor) -> float:
    """The largest real or imaginary part; the modulus of an entry may be 1.4 times as large."""
    return tensor_norms([torch.view_as_real(tensor)], math.inf)[0]

"""Clipping by the root mean square of each tensor."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from ..gradients import Gradients
from .rule import (
    Attempt,
    Decision,
    MeasuresLength,
    Stateless,
    Threshold,
    at_step,
    check_threshold,
    shrink,
    shrink_each,
)

__all__ = ["ByRms"]


@dataclasses.dataclass(frozen=True, slots=True)
class ByRms(MeasuresLength, Stateless):
    r"""Shrink each gradient tensor until the root mean square of its entries is at most `max_rms`.

        g_i <- g_i * min(1, max_rms / rms(g_i)),   rms(g_i) = ||g_i|| / sqrt(number of entries)

    The same as `ByTensorNorm` with a bound that grows with the size of the tensor, so that one
    number serves matrices and biases alike. Changes the direction of the whole gradient. Costs no
    more than the norm. The entries of a sparse gradient that are not stored count as zeros.

    Attributes:
        max_rms: In units of one entry of the gradient of the mean loss; a number, or a function of
            the number of applied updates.

    Raises:
        ValueError: `max_rms` is not greater than 0.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.tensor([3.0, 4.0, 0.0, 0.0])  # of root mean square 2.5
        >>> gradients = Gradients([weight])
        >>> ByRms(0.5).decide(gradients, Attempt(step=0)).coefficient
        0.2
        >>> gradients.apply_(); weight.grad
        tensor([0.6000, 0.8000, 0.0000, 0.0000])

    Reference: what Shazeer & Stern 2018, arXiv:1804.04235 (Adafactor), do to the update, here done
    to the gradient.
    """

    max_rms: Threshold
    needs_each: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_threshold("max_rms", self.max_rms, "ByRms")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink each gradient whose root mean square is greater than `max_rms`."""
        max_rms = at_step("max_rms", self.max_rms, attempt.step, "ByRms")
        factors = [
            shrink(norm, max_rms * math.sqrt(parameter.numel()))
            for norm, parameter in zip(gradients.norms(), gradients.parameters, strict=True)
        ]
        return shrink_each(gradients, factors, p=2.0, threshold=max_rms)

"""Weight decay as an exponent: what the decay alone does to a weight over many updates.

    weight after = weight before * product of (1 - rate * decay) ~ weight before * exp(-exponent)

    exponent = sum over applied updates of rate * decay

This is the decay-only factor of decoupled decay (AdamW, and SGD as far as its penalty is
concerned), not the trajectory: gradients and momentum go on top. A parameter without a gradient
(`grad is None`) is skipped, decay included; one with a gradient of zeros is decayed.

Reference: Loshchilov & Hutter 2017, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["DecayExponents", "decay_factor", "keep_exponent"]


class DecayExponents:
    """Adds up the exponent of each parameter group over the applied updates.

    Costs one multiplication a group and update.

    Attributes:
        totals: The exponents so far, one a group.

    Example:
        >>> exponents = DecayExponents()
        >>> for _ in range(100):
        ...     exponents.add([0.01, 0.01], [0.1, 0.0])
        >>> [round(total, 6) for total in exponents.totals]
        [0.1, 0.0]
    """

    __slots__ = ("totals",)

    def __init__(self) -> None:
        self.totals: list[float] = []

    def add(self, rates: Sequence[float], decays: Sequence[float]) -> None:
        """Note one applied update.

        Args:
            rates: The rate of each group in this update.
            decays: The weight decay of each group.
        """
        missing = len(rates) - len(self.totals)
        self.totals.extend([0.0] * missing)  # groups that joined later
        for index, (rate, decay) in enumerate(zip(rates, decays, strict=True)):
            self.totals[index] += rate * decay

    def state_dict(self) -> dict[str, Any]:
        """Give the exponents as plain numbers."""
        return {"totals": list(self.totals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the exponents of an earlier run.

        Args:
            state: What `state_dict` gave.
        """
        self.totals = list(state["totals"])


def decay_factor(rates: Iterable[float], decay: float) -> float:
    """Multiply up what the decay alone leaves of a weight.

        product over updates of (1 - rate * decay)

    Args:
        rates: The rate of each applied update.
        decay: The weight decay.

    Example:
        >>> round(decay_factor([0.01] * 100, 0.1), 4), round(math.exp(-0.1), 4)
        (0.9048, 0.9048)
    """
    return math.prod(1 - rate * decay for rate in rates)


def keep_exponent(decay: float, *, rate_sum: float, new_rate_sum: float) -> float:
    """Find the decay that keeps the exponent when the sum of the rates changes.

        new decay = decay * (sum of rates before) / (sum of rates after)

    Half the updates at the same rate need twice the decay. It keeps what the decay alone does, to
    first order; whether the model is as good has to be measured.

    Args:
        decay: The weight decay before.
        rate_sum: Sum of the rates over the updates before; greater than 0.
        new_rate_sum: The same after the change; greater than 0.

    Raises:
        ValueError: A sum is not greater than 0.

    Example:
        >>> keep_exponent(0.1, rate_sum=1.0, new_rate_sum=0.5)
        0.2
    """
    if not (rate_sum > 0 and new_rate_sum > 0):
        raise ValueError(
            f"`keep_exponent(rate_sum={rate_sum}, new_rate_sum={new_rate_sum})`: without a rate "
            "there is no decay to keep. Both must be greater than 0."
        )
    return decay * rate_sum / new_rate_sum

"""How a rate gets from one value to the next: the share of the change that is done.

A shape maps the share of the time that is over, `q`, to the share of the way that is covered, and
goes from 0 to 1 as `q` does. It serves rises and falls alike. What is left of a decay is one minus
the shape, which is how papers write it; each docstring gives that form too. Any function from 0 to
1 may stand in for these; these can also be compared, pickled and read when printed.
"""

import math
from dataclasses import dataclass

from .checks import positive


@dataclass(frozen=True, slots=True)
class Linear:
    """Change by the same amount on every update.

        shape(q) = q,  left of a decay: 1 - q

    Example:
        >>> Linear()(0.25)
        0.25
    """

    def __call__(self, q: float) -> float:
        """Return the share of the change that is done at `q`."""
        return q


@dataclass(frozen=True, slots=True)
class Cosine:
    """Start and end gently, along half a cosine.

        shape(q) = (1 - cos(pi q)) / 2,  left of a decay: (1 + cos(pi q)) / 2

    Example:
        >>> round(Cosine()(0.25), 6)
        0.146447

    Reference: Loshchilov & Hutter 2016, arXiv:1608.03983.
    """

    def __call__(self, q: float) -> float:
        """Return the share of the change that is done at `q`."""
        return (1.0 - math.cos(math.pi * q)) / 2.0


@dataclass(frozen=True, slots=True)
class Sqrt:
    """Change fast at first and slowly in the end: the "1-sqrt" decay.

        shape(q) = sqrt(q),  left of a decay: 1 - sqrt(q)

    Example:
        >>> Sqrt()(0.25)
        0.5

    Reference: Hagele et al. 2024, arXiv:2405.18392.
    """

    def __call__(self, q: float) -> float:
        """Return the share of the change that is done at `q`."""
        return math.sqrt(q)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Halve what is left of `1 + decay`: Megatron's exponential decay.

        shape(q) = 2 - 2 * 0.5^q,  left of a decay: 2 * 0.5^q - 1

    Example:
        >>> Exponential()(1.0), round(Exponential()(0.5), 6)
        (1.0, 0.585786)
    """

    def __call__(self, q: float) -> float:
        """Return the share of the change that is done at `q`."""
        return 2.0 - 2.0 * math.exp2(-q)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Change along a power of what is left: the polynomial decay.

        shape(q) = 1 - (1 - q)^power,  left of a decay: (1 - q)^power

    Args:
        power: The exponent, greater than 0. 1 is linear; 2 starts twice as fast and ends flat.

    Example:
        >>> Power(power=2)(0.5)
        0.75
    """

    power: float

    def __post_init__(self) -> None:
        positive("power", self.power)

    def __call__(self, q: float) -> float:
        """Return the share of the change that is done at `q`."""
        # A fractional power of a negative number is complex, so past its end it stays there.
        return 1.0 - math.pow(max(0.0, 1.0 - q), self.power)

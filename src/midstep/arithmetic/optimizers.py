"""What each optimizer keeps beside the weights, as bytes a trained parameter.

The state of torch's own optimizers has the dtype of the parameter (or of its master copy). What
depends on shapes is exact where the shapes are given and stated as an assumption where they are
not.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence

__all__ = ["OPTIMIZERS", "Kept", "OptimizerKind", "Shape", "assumed_shapes"]

_BLOCK = 256  # entries that share one float32 scale in blockwise 8-bit states
_SMALL = 4096  # tensors below this keep 32-bit states: Dettmers et al. 2021, arXiv:2110.02861
_SIDE = 1024  # of the square matrices assumed where no shapes are given

Shape = Sequence[int]


class OptimizerKind(enum.StrEnum):
    """Optimizers by the name that is typed."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    AMSGRAD = "amsgrad"
    ADAM8BIT = "adam8bit"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps.

    Attributes:
        name: What the line of the table says.
        of: Bytes for the trained parameters, from their shapes and the width of a state entry.
        assumes: What holds only under an assumption, when shapes are not known.
    """

    name: str
    of: Callable[[Sequence[Shape], float], float]
    assumes: str = ""


def _full(copies: int) -> Callable[[Sequence[Shape], float], float]:
    return lambda shapes, width: copies * width * sum(math.prod(shape) for shape in shapes)


def _factored(shapes: Sequence[Shape], width: float) -> float:
    """A row and a column of second moments for each matrix, all of them for a vector."""
    entries = 0
    for shape in shapes:
        if len(shape) < 2:
            entries += math.prod(shape)
        else:
            entries += math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
    return entries * width


def _eight_bit(shapes: Sequence[Shape], width: float) -> float:
    total = 0.0
    for shape in shapes:
        n = math.prod(shape)
        total += 2 * n * width if n < _SMALL else 2 * (n + 4 * math.ceil(n / _BLOCK))
    return total


def _orthogonal(shapes: Sequence[Shape], width: float) -> float:
    """Momentum for matrices; both moments of AdamW for the rest."""
    return width * sum((1 if len(shape) == 2 else 2) * math.prod(shape) for shape in shapes)


OPTIMIZERS = {
    OptimizerKind.SGD: Kept("no state", _full(0)),
    OptimizerKind.MOMENTUM: Kept("momentum", _full(1)),
    OptimizerKind.ADAM: Kept("first and second moments", _full(2)),
    OptimizerKind.ADAMW: Kept("first and second moments", _full(2)),
    OptimizerKind.AMSGRAD: Kept("two moments and the largest second", _full(3)),
    OptimizerKind.ADAM8BIT: Kept(
        "moments in 8 bits with a scale for each 256",
        _eight_bit,
        "no tensor is below 4,096 entries",
    ),
    OptimizerKind.ADAFACTOR: Kept(
        "second moments by row and column", _factored, f"all are {_SIDE} x {_SIDE} matrices"
    ),
    OptimizerKind.LION: Kept("momentum", _full(1)),
    OptimizerKind.MUON: Kept(
        "momentum of matrices, two moments of the rest", _orthogonal, "all are matrices"
    ),
    OptimizerKind.RMSPROP: Kept("mean of squares", _full(1)),
    OptimizerKind.ADAGRAD: Kept("sum of squares", _full(1)),
}


def assumed_shapes(count: int) -> list[tuple[int, ...]]:
    """Make up square matrices that hold so many parameters, where no shapes are known.

    Args:
        count: Trained parameters.

    Example:
        >>> assumed_shapes(2 * 1024 * 1024 + 5)
        [(1024, 1024), (1024, 1024), (5,)]
    """
    whole, rest = divmod(count, _SIDE * _SIDE)
    return [(_SIDE, _SIDE)] * whole + ([(rest,)] if rest else [])

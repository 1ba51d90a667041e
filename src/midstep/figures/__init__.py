"""The figures of the documents this project follows, computed afresh through the library.

Nothing here is a stored result: each number is what the library gives when it is asked, beside the
published one. Small differences in the last digits come from the kernels; more is a fault.
"""

from __future__ import annotations

from .figure import Figure

__all__ = ["Figure", "figures"]


def figures() -> list[Figure]:
    """Compute every figure, F1 to F20, in order. Random state is left as it was.

    Takes a few seconds on one core.
    """
    from ..snapshot import RandomState
    from . import accumulation, clipping, clocks, cost

    computes = [*accumulation.FIGURES, *clipping.FIGURES, *clocks.FIGURES, *cost.FIGURES]
    before = RandomState.capture()
    try:
        made = [compute() for compute in computes]
    finally:
        before.restore()
    return sorted(made, key=lambda figure: int(figure.id.removeprefix("F")))

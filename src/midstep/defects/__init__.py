"""The catalogue: every defect of a training loop that a tool of this library can name.

The first digit of a code is its group: 1 accumulation, 2 clipping, 3 precision, 4 clocks, 5 ranks,
6 non-finite values, 7 state and resume, 8 cost. A code that was given is never given again.
"""

from __future__ import annotations

from .accumulation import ACCUMULATION
from .clearing import CLEARING
from .clipped import CLIPPED
from .clipping import CLIPPING
from .clocks import CLOCKS
from .cost import COST
from .defect import SETUP, Defect, Level, Tool
from .nonfinite import NON_FINITE
from .precision import PRECISION
from .ranks import RANKS
from .state import STATE

__all__ = ["CATALOGUE", "GROUPS", "SETUP", "Defect", "Level", "Tool", "find"]

GROUPS = {
    "1": "Accumulation",
    "2": "Clipping",
    "3": "Precision",
    "4": "Clocks",
    "5": "Ranks",
    "6": "Non-finite values",
    "7": "State and resume",
    "8": "Cost",
}

CATALOGUE: tuple[Defect, ...] = (
    *ACCUMULATION,
    *CLEARING,
    *CLIPPING,
    *CLIPPED,
    *PRECISION,
    *CLOCKS,
    *RANKS,
    *NON_FINITE,
    *STATE,
    *COST,
)

_BY_CODE = {defect.code: defect for defect in CATALOGUE}
_BY_NAME = {defect.name: defect for defect in CATALOGUE}
assert len(_BY_CODE) == len(_BY_NAME) == len(CATALOGUE), "a code or a name was given twice"


def find(key: str) -> Defect:
    """Look a defect up by its code or its name.

    Args:
        key: `MS101` in any case, or `mean-of-means`.

    Raises:
        KeyError: No defect has that code or name.

    Example:
        >>> find("ms101").title
        'Means over unequal numbers of targets are averaged as if they were equal.'
    """
    defect = _BY_CODE.get(key.upper()) or _BY_NAME.get(key.lower())
    if defect is None:
        raise KeyError(f"no defect has the code or the name `{key}`; `midstep explain` lists all.")
    return defect

"""The rules: each is one function that reads an update, or a file, and reports what it sees.

A rule reports what is wrong in every way through the loop that has its parts; where the text leaves
it open it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..loops import places_of
from ..reading import Root
from ..source import Source
from .clearing import CLEARING
from .clipping import CLIPPING
from .clocks import CLOCKS
from .dividing import DIVIDING
from .files import FILES
from .nonfinite import NON_FINITE
from .ranks import RANKS
from .report import Edit, Report
from .scaling import SCALING
from .state import STATE
from .windows import WINDOWS

__all__ = ["Edit", "Report", "reports"]

OF_UPDATES = (
    *DIVIDING,
    *WINDOWS,
    *CLEARING,
    *CLIPPING,
    *SCALING,
    *CLOCKS,
    *RANKS,
    *NON_FINITE,
    *STATE,
)


def reports(source: Source, roots: Sequence[Root]) -> Iterator[Report]:
    """Apply every rule to one file.

    Args:
        source: The file.
        roots: What it does, as `read_loops` tells.
    """
    for root in roots:
        for place in places_of(root):
            for update in place.updates():
                for rule in OF_UPDATES:
                    yield from rule(update)
    for file_rule in FILES:
        yield from file_rule(source, roots)

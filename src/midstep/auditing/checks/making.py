"""Making findings: a code, a place of the user's, and the evidence in figures."""

from __future__ import annotations

from collections.abc import Mapping

from ...defects import Level, find
from ...findings import Finding
from ..events import Place

__all__ = ["close", "make"]

NOWHERE = Place("<unknown>", 1)


def make(
    code: str,
    place: Place | None,
    evidence: str,
    figures: Mapping[str, float] | None = None,
    level: Level | None = None,
) -> Finding:
    """Make a finding.

    Args:
        code: Of the defect.
        place: Where.
        evidence: One sentence with its values in backticks.
        figures: The values by name.
        level: Where the evidence says more, or less, than is usual for the defect.

    Example:
        >>> make("MS211", Place("train.py", 7), "`max_norm` is 0.").place
        'train.py:7:1'
    """
    where = NOWHERE if place is None else place
    figures = {} if figures is None else figures
    return Finding(
        find(code), where.file, where.line, evidence, figures=figures, stated_level=level
    )


def close(one: float, other: float, tolerance: float = 1e-3) -> bool:
    """Whether two numbers are the same but for rounding; nan is close to nothing."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other))

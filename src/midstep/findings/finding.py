"""A defect seen at a place in somebody's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ..defects import Defect, Level

__all__ = ["Finding", "exit_code", "once"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One defect at one line.

    Args:
        defect: Which.
        path: The file, as the user named it.
        line: Counted from 1; in a notebook, within the cell.
        evidence: One sentence: what was seen here, with its values in backticks.
        column: Counted from 1.
        figures: What was measured, by name, for machines: `{"ratio": 4.0, "num_microbatches": 4}`.
        stated_level: Where the tool is surer, or less sure, than the defect's usual level.
        cell: Number of the code cell in a notebook, counted from 1; None elsewhere.

    Example:
        >>> from midstep.defects import find
        >>> finding = Finding(find("MS103"), "train.py", 12, "`loss` is not divided by `k`.")
        >>> finding.place, str(finding.level)
        ('train.py:12:1', 'warning')
    """

    defect: Defect
    path: str
    line: int
    evidence: str
    column: int = 1
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    stated_level: Level | None = None
    cell: int | None = None

    @property
    def level(self) -> Level:
        """How sure the tool is, here."""
        return self.defect.level if self.stated_level is None else self.stated_level

    @property
    def place(self) -> str:
        """`file:line:column`, as editors open it."""
        cell = "" if self.cell is None else f":cell {self.cell}"
        return f"{self.path}{cell}:{self.line}:{self.column}"


def once(findings: Iterable[Finding]) -> list[Finding]:
    """Keep the first finding of each defect at each line, and sort them by place.

    Args:
        findings: In the order in which they were seen.

    Example:
        >>> from midstep.defects import find
        >>> twice = [Finding(find("MS103"), "train.py", line, "") for line in (9, 2, 9)]
        >>> [finding.line for finding in once(twice)]
        [2, 9]
    """
    first: dict[tuple[str, int, int, str], Finding] = {}
    for finding in findings:
        key = (finding.path, finding.cell or 0, finding.line, finding.defect.code)
        first.setdefault(key, finding)
    return [first[key] for key in sorted(first)]


def exit_code(findings: Iterable[Finding]) -> int:
    """Tell 0 (nothing to report) from 1 (something is).

    Advice that was not asked for is left out before, by `Selection`.

    Args:
        findings: What is reported.

    Example:
        >>> exit_code([])
        0
    """
    return 1 if any(True for _ in findings) else 0

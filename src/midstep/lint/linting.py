"""Lint one file: read it, apply the rules, leave out what a comment silences."""

from __future__ import annotations

import dataclasses
import re

from ..defects import find
from ..findings import Finding, once
from .reading import read_loops
from .rules import Edit, Report, reports
from .source import Source, UnreadableFile

__all__ = ["Linted", "lint"]

# A file without any of these words has nothing to find, and is not looked at.
WORTH_READING = re.compile(r"backward\(|\.step\(|preserve_rng_state")
# Where these are imported and torch is not, `backward` and `step` keep other promises.
OTHER_LIBRARY = re.compile(
    r"^\s*(?:import|from)\s+(?:mxnet|paddle|mindspore|oneflow|jittor|chainer|tensorflow|megengine)\b",
    re.MULTILINE,
)
TORCH = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Linted:
    """What was found in one file.

    Args:
        findings: Sorted by place, each defect once a line.
        edits: For findings that can be mended safely, the changes, by code and line of the text.
    """

    findings: list[Finding]
    edits: dict[tuple[str, int], tuple[Edit, ...]]


def lint(source: Source) -> Linted:
    """Find the defects of one file.

    Args:
        source: The file.

    Raises:
        UnreadableFile: It is nested too deeply.

    Example:
        >>> text = '''
        ... for x, y in loader:
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        ... '''
        >>> [finding.defect.name for finding in lint(Source("train.py", text)).findings]
        ['zero-grad-missing']
    """
    text = source.text
    if not WORTH_READING.search(text) or (OTHER_LIBRARY.search(text) and not TORCH.search(text)):
        return Linted([], {})
    try:
        return _linted(source)
    except RecursionError as error:
        raise UnreadableFile("nested too deeply to be read.") from error


def _linted(source: Source) -> Linted:
    findings: list[Finding] = []
    edits: dict[tuple[str, int], tuple[Edit, ...]] = {}
    for report in reports(source, read_loops(source.tree)):
        finding = _finding(source, report)
        if not source.suppressions.hides(finding, at=_line(report)):
            findings.append(finding)
            if report.edits:
                edits.setdefault((report.code, _line(report)), report.edits)
    return Linted(once(findings), edits)


def _line(report: Report) -> int:
    line: int = getattr(report.node, "lineno", 1)
    return line


def _finding(source: Source, report: Report) -> Finding:
    cell, line = source.place(_line(report))
    return Finding(
        find(report.code),
        source.path,
        line,
        report.evidence,
        column=getattr(report.node, "col_offset", 0) + 1,
        figures=report.figures,
        stated_level=report.level,
        cell=cell,
    )

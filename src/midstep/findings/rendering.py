"""Findings as text: for people, for machines, for code scanning and for a pull request."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ..defects import Defect, Level
from .finding import Finding

__all__ = ["Format", "render"]

WIDTH = 100
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SARIF_LEVEL = {Level.ERROR: "error", Level.WARNING: "warning", Level.ADVICE: "note"}
GITHUB_LEVEL = {Level.ERROR: "error", Level.WARNING: "warning", Level.ADVICE: "notice"}


class Format(enum.StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def render(findings: Sequence[Finding], style: Format, *, tool: str, version: str) -> str:
    """Write findings.

    Args:
        findings: In the order in which they are written.
        style: For whom.
        tool: What found them: `lint` or `audit`.
        version: Of this library.

    Returns:
        Text that ends with a newline, or nothing where there is nothing to say.

    Example:
        >>> from midstep.defects import find
        >>> finding = Finding(find("MS211"), "train.py", 7, "`max_norm` is 0.", column=5)
        >>> print(render([finding], Format.GITHUB, tool="lint", version="1"), end="")
        ::error file=train.py,line=7,col=5,title=MS211 clip-to-zero::`max_norm` is 0. Leave the ...
    """
    if style is Format.JSON:
        return _as_json({"tool": tool, "version": version, "findings": list(map(plain, findings))})
    if style is Format.SARIF:
        return _as_json(_sarif(findings, tool, version))
    line: Callable[[Finding], str] = _text if style is Format.TEXT else _annotation
    return "".join(f"{line(finding)}\n" for finding in findings)


def plain(finding: Finding) -> dict[str, Any]:
    """Give a finding as what JSON knows.

    Args:
        finding: One.
    """
    return {
        "code": finding.defect.code,
        "name": finding.defect.name,
        "level": str(finding.level),
        "path": finding.path,
        "cell": finding.cell,
        "line": finding.line,
        "column": finding.column,
        "evidence": finding.evidence,
        "figures": dict(finding.figures),
        "effect": finding.defect.effect,
        "fix": finding.defect.fix,
    }


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _text(finding: Finding) -> str:
    defect = finding.defect
    head = f"{finding.place}: {finding.level} {defect.code} {defect.name}: {finding.evidence}"
    rest = [
        textwrap.fill(f"{word}: {text}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for word, text in (("effect", defect.effect), ("fix", defect.fix))
    ]
    return "\n".join([head, *rest])


def _annotation(finding: Finding) -> str:
    defect = finding.defect
    where = {
        "file": finding.path,
        "line": str(finding.line),
        "col": str(finding.column),
        "title": f"{defect.code} {defect.name}",
    }
    properties = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in where.items())
    message = _escaped(f"{finding.evidence} {defect.fix}", "")
    return f"::{GITHUB_LEVEL[finding.level]} {properties}::{message}"


def _escaped(text: str, more: str) -> str:
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _sarif(findings: Sequence[Finding], tool: str, version: str) -> dict[str, Any]:
    defects = sorted({finding.defect.code: finding.defect for finding in findings}.items())
    index = {code: number for number, (code, _) in enumerate(defects)}
    driver = {
        "name": f"midstep {tool}",
        "version": version,
        "rules": [_sarif_rule(defect) for _, defect in defects],
    }
    results = [
        {
            "ruleId": finding.defect.code,
            "ruleIndex": index[finding.defect.code],
            "level": SARIF_LEVEL[finding.level],
            "message": {"text": f"{finding.evidence} {finding.defect.fix}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": finding.path.replace("\\", "/")},
                        "region": {"startLine": finding.line, "startColumn": finding.column},
                    }
                }
            ],
            "properties": {"figures": dict(finding.figures), "cell": finding.cell},
        }
        for finding in findings
    ]
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _sarif_rule(defect: Defect) -> dict[str, Any]:
    return {
        "id": defect.code,
        "name": defect.name,
        "shortDescription": {"text": defect.title},
        "fullDescription": {"text": f"{defect.why} {defect.effect}"},
        "help": {"text": defect.fix},
        "defaultConfiguration": {"level": SARIF_LEVEL[defect.level]},
    }

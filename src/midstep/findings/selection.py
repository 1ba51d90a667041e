"""Which findings are reported: chosen by code, by level, and by comments in the code."""

from __future__ import annotations

import dataclasses
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from ..defects import CATALOGUE, Defect, Level
from .finding import Finding

__all__ = ["Selection", "Suppressions"]

COMMENT = re.compile(r"#\s*midstep:\s*ignore\[(?P<codes>[^\]]*)\]\s*(?P<reason>.*)")


def matches(defect: Defect, pattern: str) -> bool:
    """Whether a pattern names this defect: `MS`, `MS2`, `MS204`, or its name.

    Args:
        defect: Of the catalogue.
        pattern: The start of a code, in any case, or a name.
    """
    return defect.code.startswith(pattern.upper()) or defect.name == pattern.lower()


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which defects are reported.

    Args:
        select: Codes, starts of codes, or names; empty for all.
        ignore: The same, for those that are left out. It wins over `select`.
        advice: Report advice too.

    Raises:
        ValueError: A pattern that names no defect.

    Example:
        >>> from midstep.defects import find
        >>> selection = Selection(select=("MS1",), ignore=("tail-wrong-divisor",))
        >>> [selection.takes(Finding(find(code), "a.py", 1, "")) for code in ("MS101", "MS104")]
        [True, False]
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    advice: bool = False

    def __post_init__(self) -> None:
        for option, patterns in (("select", self.select), ("ignore", self.ignore)):
            for pattern in patterns:
                if not pattern or not any(matches(defect, pattern) for defect in CATALOGUE):
                    raise ValueError(
                        f"`{option}`: `{pattern}` names no defect, so it would do nothing. Use a "
                        "code (`MS204`), the start of one (`MS2`) or a name (`clip-after-step`); "
                        "`midstep explain` lists all."
                    )

    def takes(self, finding: Finding) -> bool:
        """Whether this finding is reported."""
        if finding.level is Level.ADVICE and not self.advice:
            return False
        if any(matches(finding.defect, pattern) for pattern in self.ignore):
            return False
        return not self.select or any(matches(finding.defect, pattern) for pattern in self.select)

    def of(self, findings: Iterable[Finding]) -> list[Finding]:
        """Keep what is reported."""
        return [finding for finding in findings if self.takes(finding)]


class Suppressions:
    r"""The comments `# midstep: ignore[MS204] why` of one file.

    A comment speaks of its own line; one that stands alone speaks of the next line of code.

    Args:
        source: The text of the file.

    Example:
        >>> text = "optimizer.step()  # midstep: ignore[MS109] one step only\n"
        >>> from midstep.defects import find
        >>> Suppressions(text).hides(Finding(find("zero-grad-missing"), "a.py", 1, ""))
        True
    """

    def __init__(self, source: str) -> None:
        self._patterns: dict[int, list[str]] = {}
        # Most files have none: reading the tokens of a file costs as much as parsing it.
        if "midstep:" in source:
            for line, patterns in _comments(source):
                self._patterns.setdefault(line, []).extend(patterns)

    def hides(self, finding: Finding, *, at: int | None = None) -> bool:
        """Whether a comment says to leave this finding out.

        Args:
            finding: The one in question.
            at: Its line in the text, where that is not the line that is shown.
        """
        patterns = self._patterns.get(finding.line if at is None else at, ())
        return any(matches(finding.defect, pattern) for pattern in patterns if pattern)

    def unknown(self) -> list[tuple[int, str]]:
        """The line and the word of every comment that names no defect."""
        return [
            (line, pattern)
            for line, patterns in sorted(self._patterns.items())
            for pattern in patterns
            if not pattern or not any(matches(defect, pattern) for defect in CATALOGUE)
        ]


def _comments(source: str) -> Iterator[tuple[int, list[str]]]:
    waiting: list[str] = []  # patterns of comments that stand alone, for the next line of code
    nothing = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                if found := COMMENT.match(token.string):
                    patterns = [part.strip() for part in found["codes"].split(",")]
                    if token.line[: token.start[1]].strip():
                        yield token.start[0], patterns
                    else:
                        waiting += patterns
            elif token.type not in nothing and waiting:
                yield token.start[0], waiting
                waiting = []
    except (tokenize.TokenError, SyntaxError):
        return  # the reader of the file says what is wrong with it

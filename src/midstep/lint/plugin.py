"""The same findings inside flake8: errors and warnings, under their codes.

flake8 finds this through an entry point; `--select`, `--extend-ignore` and `# noqa: MS109` are its
own, and `# midstep: ignore[MS109]` counts here as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from ..defects import Level
from .linting import lint
from .source import Source

__all__ = ["Plugin"]


def _version() -> str:
    try:
        return version("midstep")
    except PackageNotFoundError:
        return "unknown"


class Plugin:
    r"""What flake8 makes for each file.

    Args:
        tree: Parsed by flake8; the text is parsed anew, as the linter wants it.
        filename: As flake8 names the file.
        lines: The text.

    Example:
        >>> loop = ["for x in data:\n", "    loss(x).backward()\n", "    optimizer.step()\n"]
        >>> plugin = Plugin(ast.parse("".join(loop)), "train.py", loop)
        >>> [(line, column, text[:23]) for line, column, text, _ in plugin.run()]
        [(3, 4, 'MS109 zero-grad-missing')]
    """

    name = "midstep"
    version = _version()

    def __init__(self, tree: ast.AST, filename: str, lines: Sequence[str]) -> None:
        self.filename, self.text = filename, "".join(lines)
        self.tree = tree

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Give each finding as flake8 wants it."""
        for finding in lint(Source(self.filename, self.text)).findings:
            if finding.level is not Level.ADVICE:
                text = f"{finding.defect.code} {finding.defect.name}: {finding.evidence}"
                yield finding.line, finding.column - 1, text, type(self)

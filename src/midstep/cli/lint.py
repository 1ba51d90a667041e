"""`midstep lint`: the defects of training loops, found in their text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from ..findings import Finding, Format, Selection, exit_code, render
from .failures import FAILED, attempt, fail

if TYPE_CHECKING:
    from ..lint import Source
    from ..lint.settings import Settings

__all__ = ["lint"]

Paths = Annotated[list[Path], typer.Argument(help="Files, notebooks and folders.", metavar="PATHS")]
Select = Annotated[
    list[str] | None,
    typer.Option(help="Report these only: a code, the start of one, or a name.", metavar="CODE"),
]
Ignore = Annotated[
    list[str] | None, typer.Option(help="Leave these out; wins over --select.", metavar="CODE")
]
Advice = Annotated[bool, typer.Option("--advice", help="Report advice, too, and fail for it.")]
Fix = Annotated[bool, typer.Option("--fix", help="Mend in place what can be mended safely.")]
Style = Annotated[Format, typer.Option("--format", help="How findings are written.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")]


def lint(  # noqa: PLR0917 - an option of the command is an argument here
    paths: Paths,
    select: Select = None,
    ignore: Ignore = None,
    advice: Advice = False,
    fix: Fix = False,
    style: Style = Format.TEXT,
    traceback: Traceback = False,
) -> int:
    """Find defects of training loops in their text, without running anything.

    Exit codes: 0 nothing found, 1 something was, 2 a file could not be read. A comment silences a
    finding on its line: `# midstep: ignore[MS104] every pass has full windows`.
    """

    def action() -> int:
        from ..lint.settings import settings_for

        settings = settings_for(paths[0] if paths[0].is_dir() else paths[0].parent)
        selection = Selection(
            _codes(select) or settings.select,
            _codes(ignore) or settings.ignore,
            advice=advice or settings.advice,
        )
        findings, failed = _look(paths, settings, fix=fix)
        reported = selection.of(findings)
        typer.echo(render(reported, style, tool="lint", version=__version__), nl=False)
        if style is Format.TEXT and reported:
            _total(reported)
        return FAILED if failed else exit_code(reported)

    return attempt(action, traceback=traceback)


def _codes(given: Sequence[str] | None) -> tuple[str, ...]:
    """`--select MS1,MS2` and `--select MS1 --select MS2` are the same."""
    return tuple(code.strip() for text in given or () for code in text.split(","))


def _look(paths: Sequence[Path], settings: Settings, *, fix: bool) -> tuple[list[Finding], bool]:
    """Read every file; one that cannot be read does not hide the others."""
    from ..lint import UnreadableFile, python_files, read
    from ..lint import lint as lint_source

    findings: list[Finding] = []
    failed = False
    for path in python_files(paths):
        if settings.leaves_out(path):
            continue
        try:
            source = read(path)
            if fix and path.suffix != ".ipynb":
                source = _mended(path) or source
            for line, word in source.suppressions.unknown():
                fail(f"warning: `{path}:{line}`: `{word}` in a comment names no defect.")
            findings += lint_source(source).findings
        except UnreadableFile as error:
            fail(f"`{path}`: {error}")
            failed = True
    return findings, failed


def _mended(path: Path) -> Source | None:
    from ..lint import read
    from ..lint.fixes import fixed

    source = read(path)
    text, number = fixed(source)
    if number == 0:
        return None
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
    sys.stderr.write(f"midstep: `{path}`: mended {number}.\n")
    return read(path)


def _total(findings: Sequence[Finding]) -> None:
    levels = [str(finding.level) for finding in findings]
    counts = [
        f"{levels.count(level)} {level if levels.count(level) == 1 else plural}"
        for level, plural in (("error", "errors"), ("warning", "warnings"), ("advice", "advice"))
        if level in levels
    ]
    sys.stderr.write(f"midstep: {', '.join(counts)}. `midstep explain CODE` says more.\n")

"""`midstep lint`: the defects of training loops, found in their text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .. import __version__
from ..findings import Finding, Format, Selection, exit_code, render
from .failures import FAILED, attempt, fail, period

if TYPE_CHECKING:
    from ..lint import Source
    from ..lint.settings import Settings

__all__ = ["lint_directly"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{period(message[:1].upper() + message[1:])} See `midstep lint --help`.")


def lint_directly(arguments: Sequence[str]) -> int:
    """Run the command without typer, which loads pydantic: that takes longer than most linting.

    Args:
        arguments: What follows `midstep lint`.

    Returns:
        The exit code.
    """

    def action() -> int:
        return _lint(_parser().parse_args(list(arguments)))

    return attempt(action, traceback="--traceback" in arguments)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="midstep lint",
        allow_abbrev=False,
        description="Find defects of training loops in their text, without running anything.",
        epilog="Exit codes: 0 nothing found, 1 something was, 2 a file could not be read. A "
        "comment silences a finding on its line: `# midstep: ignore[MS104] windows are full`.",
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATHS", help="files, notebooks and folders")
    add(
        "--select",
        action="append",
        metavar="CODE",
        help="report these only: a code, the start of one, or a name",
    )
    add("--ignore", action="append", metavar="CODE", help="leave these out; wins over --select")
    add("--advice", action="store_true", help="report advice, too, and fail for it")
    add("--fix", action="store_true", help="mend in place what can be mended safely")
    add(
        "--format",
        dest="style",
        choices=[str(style) for style in Format],
        default=str(Format.TEXT),
        help="how findings are written (default: text)",
    )
    add("--traceback", action="store_true", help="show where an error came from")
    return parser


def _lint(given: argparse.Namespace) -> int:
    from ..lint.settings import settings_for

    first: Path = given.paths[0]
    settings = settings_for(first if first.is_dir() else first.parent)
    selection = Selection(
        _codes(given.select) or settings.select,
        _codes(given.ignore) or settings.ignore,
        advice=given.advice or settings.advice,
    )
    findings, failed = _look(given.paths, settings, fix=given.fix)
    reported, style = selection.of(findings), Format(given.style)
    sys.stdout.write(render(reported, style, tool="lint", version=__version__))
    if style is Format.TEXT and reported:
        _total(reported)
    return FAILED if failed else exit_code(reported)


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
    path.write_bytes(text.encode(source.encoding))
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

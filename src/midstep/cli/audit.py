"""`midstep audit`: run a script unchanged, and say what is wrong with its loop."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..findings import Format, Selection, exit_code, render
from .failures import FAILED, fail, period

if TYPE_CHECKING:
    from ..auditing.launching import Program
    from ..findings import Finding

__all__ = ["SETTINGS", "audit"]

# What follows the script is the script's.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def audit(  # noqa: PLR0917 - an option of the command is an argument here
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="What the script is given.")
    ] = None,
    is_module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as after `python -m`.")
    ] = False,
    windows: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Watch so many steps; the script runs to its end."),
    ] = None,
    style: Annotated[
        Format, typer.Option("--format", help="How findings are written.")
    ] = Format.TEXT,
    select: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Report only these: MS2, MS204, name.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave these out.")
    ] = None,
    advice: Annotated[bool, typer.Option("--advice", help="Report advice, too.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the findings into a file.")
    ] = None,
) -> int:
    """Run a script unchanged, watch its loop, and report each defect with file and line.

    Many ranks: torchrun --nproc-per-node 2 -m midstep audit train.py

    Exit code: that of the script if it failed; else 1 if something was found, and 0 if not.
    """
    try:
        selection = Selection(tuple(select or ()), tuple(ignore or ()), advice)
        program = _load(script, is_module)
    except (OSError, SyntaxError, ImportError, ValueError) as error:
        fail(period(_in_words(script, error)))
        return FAILED
    out = None if out is None else out.absolute()  # the script may go elsewhere
    is_for_machines = style in {Format.JSON, Format.SARIF} and out is None
    stdout = _only_findings_on_stdout() if is_for_machines else None
    return _run(program, arguments or [], selection, windows, _Writer(style, out, stdout))


def _load(script: str, is_module: bool) -> Program:
    from ..auditing.launching import load_module, load_script

    return load_module(script) if is_module else load_script(script)


def _in_words(script: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"`{script}`: {error.strerror}"
    if isinstance(error, SyntaxError):
        return f"`{error.filename}:{error.lineno}`: {error.msg}"
    return str(error)


class _Writer:
    """Writes findings where they were wanted."""

    def __init__(self, style: Format, out: Path | None, stdout: Any) -> None:
        self.style = style
        self.out = out
        self.stdout = stdout

    def write(self, findings: Sequence[Finding], summary: str) -> None:
        from .. import __version__

        text = render(findings, self.style, tool="audit", version=__version__)
        if self.out is not None:
            self.out.write_text(text, encoding="utf-8")
        elif self.stdout is not None:
            self.stdout.write(text)
            self.stdout.flush()
        else:
            sys.stdout.flush()
            _show(text, self.style)
        if self.style is Format.TEXT:
            sys.stderr.write(f"{summary}\n")


def _run(
    program: Program,
    arguments: Sequence[str],
    selection: Selection,
    windows: int | None,
    writer: _Writer,
) -> int:
    with _uncollected():
        from ..auditing.gathering import Folder, watch_children
        from ..auditing.recorder.watching import watch

        # What was imported stays; nobody need look through it again.
        gc.freeze()

    folder, here = Folder(), Path.cwd()  # the script may leave it
    with (
        watch(own=program.own, max_updates=windows, find_optimizers=False) as recorder,
        watch_children(recorder, folder.path, program.own),
    ):
        ending = program.run(arguments)
        is_complete = ending.error is None and ending.code == 0
        recording = recorder.recording(is_complete=is_complete)
    folder.write(recording, f"rank{folder.local_rank}")
    if not folder.reports:
        return ending.code
    gc.unfreeze()
    with _uncollected():
        from ..auditing.context import judge

        recordings = folder.read()
        findings = judge(recordings, selection, here)
    num_updates = sum(r.num_updates for r in recordings)
    writer.write(findings, _summary(findings, num_updates, len(recordings)))
    return ending.code or exit_code(findings)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from going through all of torch: 80 ms each time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _summary(findings: Sequence[Finding], num_updates: int, num_processes: int) -> str:
    where = f"{num_updates:,} updates" + (
        f" of {num_processes} processes" if num_processes > 1 else ""
    )
    if not num_updates:
        return "midstep audit: no step of an optimizer was seen, so nothing was audited."
    if not findings:
        return f"midstep audit: nothing found in {where}."
    found = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
    return f"midstep audit: {found} in {where}. `midstep explain CODE` tells more."


def _only_findings_on_stdout() -> Any:
    """Send what the script prints to stderr, and return the stdout that there was."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stdout


def _show(text: str, style: Format) -> None:
    """Write to a terminal in colour, elsewhere as it is."""
    if style is not Format.TEXT or not sys.stdout.isatty():
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.text import Text

    colours = {"error": "bold red", "warning": "bold yellow", "advice": "bold cyan"}
    console = Console()
    for line in text.splitlines():
        shown = Text(line)
        if not line.startswith(" "):
            for level, colour in colours.items():
                shown.highlight_regex(rf": {level} MS\d+ [\w-]+", colour)
            shown.highlight_regex(r"`[^`]*`", "bold")
        else:
            shown.stylize("dim")
        console.print(shown, soft_wrap=True)

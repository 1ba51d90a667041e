"""`midstep audit`: run a script unchanged, and say what is wrong with its loop.

A command line that is in order is read here, in no time; any other, and `--help`, is left to typer
(`audit_options`), which takes longer to load than most scripts are slowed down by the watching.
What only a report needs is loaded when the script has ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..auditing.launching import Program, load_module, load_script
from .failures import FAILED, FOUND, INTERRUPTED, fail, period

if TYPE_CHECKING:
    from ..findings import Finding, Format, Selection

__all__ = ["Asked", "asked_by", "audit_directly"]


class Asked:
    """What the command was asked to do.

    Args:
        script: The script or module.
        arguments: What it is given.
    """

    def __init__(self, script: str, arguments: tuple[str, ...]) -> None:
        self.script = script
        self.arguments = arguments
        self.is_module = False
        self.windows: int | None = None
        self.style: Format | None = None  # None for text
        self.select: tuple[str, ...] = ()
        self.ignore: tuple[str, ...] = ()
        self.advice = False
        self.out: Path | None = None


def asked_by(arguments: Sequence[str]) -> Asked | None:
    """Read a command line that is in order.

    Args:
        arguments: What follows `midstep audit`.

    Returns:
        What is asked for; None where the line asks for help, or is wrong or unusual.
    """
    rest, flags = list(arguments), set[str]()
    values: dict[str, list[str]] = {}
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in FLAGS and not equals:
            flags.add(FLAGS[name])
        elif name in OPTIONS:
            if not equals:
                value = rest.pop(0) if rest else ""
            if not value or value.startswith("-"):
                return None
            values.setdefault(name, []).append(value)
        else:
            return None
    windows, style = values.get("--windows", [""])[-1], values.get("--format", ["text"])[-1]
    is_number = windows.isascii() and windows.isdecimal() and int(windows) > 0
    if not rest or (windows and not is_number) or style not in STYLES:
        return None
    asked = Asked(rest[0], tuple(rest[1:]))
    asked.is_module, asked.advice = "module" in flags, "advice" in flags
    asked.windows = int(windows) if windows else None
    if style != "text":
        from ..findings import Format

        asked.style = Format(style)
    asked.select, asked.ignore = (tuple(values.get(n, ())) for n in ("--select", "--ignore"))
    asked.out = Path(values["--out"][-1]) if "--out" in values else None
    return asked


FLAGS = {"--module": "module", "-m": "module", "--advice": "advice"}
OPTIONS = ("--windows", "--format", "--select", "--ignore", "--out")
STYLES = ("text", "json", "sarif", "github")


def audit_directly(asked: Asked, *, ends_process: bool = False) -> int:
    """Run the command.

    Args:
        asked: What it is to do.
        ends_process: Leave what was imported before the script to the end of the process, where
            the garbage collector need not take torch apart (0.4 s).

    Returns:
        The exit code.
    """
    try:
        if asked.select or asked.ignore:
            _selection(asked)  # a name that is none is told before anything runs
        load = load_module if asked.is_module else load_script
        program = load(asked.script)
    except (OSError, SyntaxError, ImportError, ValueError) as error:
        fail(period(_in_words(asked.script, error)))
        return FAILED
    if asked.out is not None:
        asked.out = asked.out.absolute()  # the script may go elsewhere
    is_for_machines = asked.style in {"json", "sarif"} and asked.out is None
    stdout = _only_findings_on_stdout() if is_for_machines else None
    try:
        return _run(program, asked, stdout)
    except KeyboardInterrupt:  # one more while the findings are gathered
        return INTERRUPTED + 2
    except BrokenPipeError:
        # Nobody reads the findings; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FOUND
    finally:
        if not ends_process:
            gc.unfreeze()


def _selection(asked: Asked) -> Selection:
    from ..findings import Selection

    return Selection(asked.select, asked.ignore, asked.advice)


def _in_words(script: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"`{script}`: {error.strerror}"
    if isinstance(error, SyntaxError):
        return f"`{error.filename}:{error.lineno}`: {error.msg}"
    return str(error)


def _run(program: Program, asked: Asked, stdout: Any) -> int:
    with _uncollected():
        from ..auditing.gathering import Folder, watch_children
        from ..auditing.recorder.watching import watch

        # What was imported stays; nobody need look through it again.
        gc.freeze()

    folder, here = Folder(), Path.cwd()  # the script may leave it
    # It may put others in their place, or close them.
    streams = _Streams(stdout or sys.stdout, sys.stderr)
    with (
        watch(own=program.own, max_updates=asked.windows, find_optimizers=False) as recorder,
        watch_children(recorder, folder.path, program.own),
    ):
        ending = program.run(asked.arguments)
        is_complete = ending.error is None and ending.code == 0
        recording = recorder.recording(is_complete=is_complete)
    if folder.is_copy:  # of an `os.fork()` in the script, whose first process reports for both
        if recording.events:
            folder.write(recording, f"child{os.getpid()}")
        return ending.code
    folder.write(recording, f"rank{folder.local_rank}")
    if not folder.reports:
        return ending.code
    with _uncollected():
        from ..auditing.context import judge
        from ..findings import exit_code

        recordings = folder.read()
        findings = judge(recordings, _selection(asked), here)
        num_updates = sum(r.num_updates for r in recordings)
        summary = _summary(findings, num_updates, len(recordings))
        is_written = _write(findings, summary, asked, streams)
    return ending.code or (exit_code(findings) if is_written else FAILED)


class _Streams:
    """The streams that there were before the script ran."""

    def __init__(self, out: Any, err: Any) -> None:
        self.out = out
        self.err = err

    def write(self, text: str, *, to_err: bool = False) -> None:
        """Write to the one that was wanted; to stderr, or nowhere, where the script closed it."""
        for stream in (self.err,) if to_err else (self.out, self.err):
            if stream is None:
                continue
            try:
                stream.write(text)
                stream.flush()
            except BrokenPipeError:
                raise
            except (OSError, ValueError):
                continue
            return


def _write(findings: Sequence[Finding], summary: str, asked: Asked, streams: _Streams) -> bool:
    """Write findings where they were wanted, and say whether they got there."""
    from .. import __version__
    from ..findings import Format, render

    style = asked.style or Format.TEXT
    text = render(findings, style, tool="audit", version=__version__)
    failure: OSError | None = None
    if asked.out is not None:
        try:
            asked.out.write_text(text, encoding="utf-8")
        except OSError as error:
            failure = error
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()  # what the script has printed comes first
    if asked.out is None or failure is not None:
        _show(text, style, streams)
    if style is Format.TEXT:
        streams.write(f"{summary}\n", to_err=True)
    if failure is not None:
        line = f"`{asked.out}`: {failure.strerror}; the findings are on stdout."
        streams.write(f"midstep: {line}\n", to_err=True)
    return failure is None


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


def _show(text: str, style: Format, streams: _Streams) -> None:
    """Write to a terminal in colour, elsewhere as it is."""
    out = streams.out
    if style != "text" or out is None or out.closed or not out.isatty():
        streams.write(text)
        return
    from rich.console import Console
    from rich.text import Text

    colours = {"error": "bold red", "warning": "bold yellow", "advice": "bold cyan"}
    console = Console(file=out)
    for line in text.splitlines():
        shown = Text(line)
        if not line.startswith(" "):
            for level, colour in colours.items():
                shown.highlight_regex(rf": {level} MS\d+ [\w-]+", colour)
            shown.highlight_regex(r"`[^`]*`", "bold")
        else:
            shown.stylize("dim")
        console.print(shown, soft_wrap=True)

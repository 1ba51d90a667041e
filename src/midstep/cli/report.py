"""`midstep report`: what happened to a run, in words, on a page and as pictures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import report_options as given
from .failures import FINE, FOUND, attempt
from .stopping import Stop

if TYPE_CHECKING:
    from ..report import Judgement, Run

__all__ = ["report"]

_POLL_SECONDS = 0.2
_LOGS = ("updates.jsonl", "held_out.jsonl", "metrics.csv", "trainer_state.json")


def report(  # noqa: PLR0917 - an option of the command is an argument here
    runs: given.Runs,
    out: given.PageFile = None,
    page: given.WritesPage = True,
    png: given.PictureFolder = None,
    dark: given.IsDark = False,
    as_json: given.AsJson = False,
    column: given.ColumnNames = None,
    max_norm: given.MaxNorm = None,
    watch: given.Watches = False,
    port: given.Port = 0,
    traceback: given.Traceback = False,
) -> int:
    """Say what happened to a run, and write it as one page that opens offline.

    Exit code 0 when nothing was found, 1 when something was, 2 when a log cannot be read.
    """

    def action() -> int:
        def read() -> list[Run]:
            return _read(runs, column or (), max_norm)

        if watch:
            return _watch(runs, read, port)
        found = read()
        judgements = _said(found, as_json=as_json)
        if page:
            path = out if out is not None else _place(runs)
            _write(found, path, quietly=as_json)
        if png is not None:
            from ..report.page import write_pictures

            written = write_pictures(found, png, dark=dark)
            if not as_json:
                typer.echo(f"{'pictures':20}{written[0]} and {len(written) - 1} more")
        return FOUND if any(judgement.findings for judgement in judgements) else FINE

    return attempt(action, traceback=traceback)


def _read(paths: Sequence[Path], columns: Sequence[str], max_norm: float | None) -> list[Run]:
    from ..report import read

    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"`--max-norm {max_norm}`: a threshold must be greater than 0")
    chosen = dict(_pair(text) for text in columns)
    names = [path.resolve().name for path in paths]
    found = []
    for path in paths:
        # Two runs of one name are told apart by their paths.
        name = str(path) if names.count(path.resolve().name) > 1 else None
        found.append(read(path, name=name, columns=chosen, max_norm=max_norm))
    return found


def _pair(text: str) -> tuple[str, str]:
    field, equals, name = text.partition("=")
    if not (field and equals and name):
        raise ValueError(
            f"`--column {text}`: it takes a field of a run and a name in the log, as in `--column "
            "grad_norm=train/gnorm`"
        )
    return field, name


def _said(runs: Sequence[Run], *, as_json: bool) -> list[Judgement]:
    from ..report import judge

    judgements = [judge(run) for run in runs]
    if as_json:
        typer.echo(json.dumps([judgement.to_json() for judgement in judgements], indent=2))
    else:
        for judgement in judgements:
            for line in judgement.lines():
                typer.echo(line)
    return judgements


def _place(paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        return Path("report.html")
    (path,) = paths
    if path.is_dir():
        return path / "report.html"
    return path.with_name("report.html" if path.name in _LOGS else f"{path.stem}.html")


def _write(runs: Sequence[Run], path: Path, *, quietly: bool) -> None:
    from ..report.page import write_page

    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(runs, path)
    if not quietly:
        typer.echo(f"{'page':20}{path}")


def _watch(paths: Sequence[Path], read: Callable[[], list[Run]], port: int) -> int:
    from ..report.page import serving

    stop = Stop()
    with stop.listening():
        _wait_for_updates(paths, stop)
        if stop():
            return FINE
        read()  # what cannot be read is said here, not in the browser
        with serving(read, lambda: _state_of(paths), port=port) as address:
            typer.echo(f"{address} shows {', '.join(map(str, paths))}; Ctrl-C ends it")
            sys.stdout.flush()
            while not stop():
                time.sleep(_POLL_SECONDS)
    return FINE


def _wait_for_updates(paths: Sequence[Path], stop: Stop) -> None:
    """A run that has just begun has a folder, and its first update in a moment."""
    told = False
    while not stop() and any(_is_about_to_begin(path) for path in paths):
        if not told:
            typer.echo("waiting for the first update")
            sys.stdout.flush()
            told = True
        time.sleep(_POLL_SECONDS)


def _is_about_to_begin(path: Path) -> bool:
    updates = path / "updates.jsonl"
    has_begun = updates.is_file() and updates.stat().st_size > 0
    return (path / "run.json").is_file() and not has_begun


def _state_of(paths: Sequence[Path]) -> str:
    """A word that changes with the logs: their sizes and times."""
    words = []
    for path in paths:
        files = (
            sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        )
        for file in files:
            if path.is_dir() and file.suffix in (".html", ".png", ".pt", ".part"):
                continue
            status = file.stat()
            words.append(f"{status.st_size}-{status.st_mtime_ns}")
    return ".".join(words)

"""`midstep figures`: every published figure, computed again, beside what was published."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Annotated

import typer

from . import declarations as given
from .failures import FINE, FOUND, attempt

if TYPE_CHECKING:
    from ..figures import Figure

__all__ = ["figures"]


class Format(enum.StrEnum):
    """How the rows are printed."""

    TABLE = "table"
    JSON = "json"


def figures(
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="A table to read, or a JSON list of objects with id, setup, published, computed, "
            "agrees and note. Default: table.",
            show_default=False,
        ),
    ] = Format.TABLE,
    traceback: given.Traceback = False,
) -> int:
    """Compute the figures of the documents again, beside what they published.

    Exit code 1 when a figure and the library part.
    """

    def action() -> int:
        from ..figures import figures as compute

        rows = compute()
        if form is Format.JSON:
            typer.echo(json.dumps([row.to_json() for row in rows], indent=2, allow_nan=False))
        else:
            _print_table(rows)
        return FINE if all(row.agrees for row in rows) else FOUND

    return attempt(action, traceback=traceback)


def _print_table(rows: list[Figure]) -> None:
    from ..figures.figure import entries

    for row in rows:
        typer.echo(f"{row.id:4} {'agrees' if row.agrees else 'PARTS '}  {row.setup}")
        typer.echo(f"     published  {entries(row.published) or 'no figure'}")
        typer.echo(f"     computed   {entries(row.computed)}")
        if row.note:
            typer.echo(f"     here       {row.note}")
    parted = [row.id for row in rows if not row.agrees]
    part = "parts" if len(parted) == 1 else "part"
    verdict = f"{', '.join(parted)} {part} from what was published" if parted else "all agree"
    typer.echo(f"{len(rows)} figures, {verdict}.")

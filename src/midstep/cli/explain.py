"""`midstep explain`: one defect of the catalogue in full, or all of them in one line each."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from ..defects import CATALOGUE, GROUPS, Defect, find
from .failures import FINE, attempt

__all__ = ["explain"]

WIDTH = 88

Code = Annotated[
    str | None,
    typer.Argument(help="A code (MS104) or a name (tail-wrong-divisor).", metavar="[CODE]"),
]


def explain(code: Code = None) -> int:
    """Explain a defect: why it happens, what it does, bad and good code. Without one, list all."""

    def action() -> int:
        if code is None:
            typer.echo(listing(), nl=False)
            return FINE
        try:
            defect = find(code)
        except KeyError as error:
            raise ValueError(error.args[0]) from error
        typer.echo(explanation(defect), nl=False)
        return FINE

    return attempt(action, traceback=False)


def listing() -> str:
    """Every defect in one line, by group."""
    lines: list[str] = []
    for group, title in GROUPS.items():
        lines += [f"{title} (MS{group}xx)"]
        for defect in CATALOGUE:
            if defect.code[2] == group:
                lines.append(f"  {defect.code}  {defect.level:<8}{defect.name}")
        lines.append("")
    return "\n".join([*lines[:-1], ""])


def explanation(defect: Defect) -> str:
    """One defect in full.

    Args:
        defect: Of the catalogue.

    Example:
        >>> print(explanation(find("MS211")).splitlines()[0])
        MS211 clip-to-zero (error; found by lint, audit)
    """
    tools = ", ".join(defect.tools)
    parts = [
        f"{defect.code} {defect.name} ({defect.level}; found by {tools})",
        textwrap.fill(defect.title, WIDTH),
        *(
            textwrap.fill(f"{word} {text}", WIDTH)
            for word, text in (
                ("Why:", defect.why),
                ("Effect:", defect.effect),
                ("Fix:", defect.fix),
            )
        ),
        f"Bad:\n\n{textwrap.indent(defect.bad.rstrip(), '    ')}",
    ]
    if defect.stops_with:
        parts.append(f"It stops with {defect.stops_with}.")
    parts.append(f"Good:\n\n{textwrap.indent(defect.good.rstrip(), '    ')}")
    return "\n\n".join(parts) + "\n"

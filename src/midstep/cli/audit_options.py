"""`midstep audit` as typer knows it: its options, their help, and what is wrong with a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..findings import Format
from .audit import Asked, audit_directly

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
    asked = Asked(script, tuple(arguments or ()))
    asked.is_module, asked.windows, asked.style, asked.out = is_module, windows, style, out
    asked.select, asked.ignore, asked.advice = tuple(select or ()), tuple(ignore or ()), advice
    return audit_directly(asked)

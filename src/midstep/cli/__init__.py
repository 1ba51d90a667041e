"""The command `midstep`: one module a command, and nothing of torch before a command needs it.

Exit codes: 0 fine, 1 found something, 2 could not do it; 128 plus the number of the signal when it
was stopped by one. What goes wrong is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from .audit import SETTINGS, audit
from .explain import explain
from .failures import FINE, fail, period
from .lint import lint, lint_directly
from .train import train

__all__ = ["main", "run"]

# No completion: it would add two options to every page of help.
app = typer.Typer(
    name="midstep",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command(context_settings=SETTINGS)(audit)
app.command()(lint)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(lint)
app.command()(explain)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"midstep {__version__}")
        raise typer.Exit


@app.callback()
def midstep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Everything between backward() and optimizer.step(), exactly."""


def run(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: What follows `midstep`.

    Returns:
        The exit code.

    Example:
        >>> run(["--version"])
        midstep ...
        0
    """
    if arguments[:1] == ["lint"]:
        return lint_directly(arguments[1:])
    try:
        code = app(list(arguments), prog_name="midstep", standalone_mode=False)
    except typer.TyperException as error:
        if (message := error.format_message()) != "":  # it is empty where help was printed instead
            # typer puts this before what it takes from an enum.
            message = message.replace("Value error, ", "")
            command = getattr(getattr(error, "ctx", None), "command_path", "midstep")
            fail(f"{period(message)} See `{command} --help`.")
        return error.exit_code
    return code if isinstance(code, int) else FINE


def main() -> None:
    """Run the command with the arguments of this process, and end it."""
    sys.exit(run(sys.argv[1:]))

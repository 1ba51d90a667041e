"""The command line as typer knows it: the commands in the order of the help, loaded when named."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from .failures import FINE, period
from .launch import Launch, Speaker
from .lint import lint_directly

__all__ = ["invoke"]

# Each command, and the module that holds a function of its name, with `_` for `-`.
COMMANDS = {
    "train": "train",
    "lr-range": "lr_range",
    "compare": "compare",
    "threshold": "choices",
    "batch": "choices",
    "schedule": "schedule",
    "audit": "audit_options",
    "figures": "figures",
    "verify": "verify",
    "lint": "application",  # which knows typer, as `lint` need not
    "explain": "explain",
    "report": "report",
    "plan": "plan",
}

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def lint(arguments: typer.Context) -> int:
    """Find defects of training loops in their text, without running anything."""
    return lint_directly(arguments.args)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: What follows `midstep`.

    Returns:
        The exit code.
    """
    try:
        named = [name for name in arguments[:1] if name in COMMANDS]
        app = _application(named or COMMANDS)
        code = app(list(arguments), prog_name="midstep", standalone_mode=False)
    except typer.TyperException as error:
        if (message := error.format_message()) != "":  # it is empty where help was printed instead
            # typer puts this before what it takes from an enum.
            message = message.replace("Value error, ", "")
            command = getattr(getattr(error, "ctx", None), "command_path", "midstep")
            is_alone = command != "midstep train"  # no other command knows of ranks
            with Speaker(Launch() if is_alone else Launch.of(os.environ)) as speaker:
                speaker(f"{period(message)} See `{command} --help`.", error)
        return error.exit_code
    return code if isinstance(code, int) else FINE


def _application(names: Sequence[str] | dict[str, str]) -> typer.Typer:
    # No completion: it would add two options to every page of help.
    app = typer.Typer(
        name="midstep",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(midstep)
    for name in names:
        module = importlib.import_module(f".{COMMANDS[name]}", __package__)
        command = getattr(module, name.replace("-", "_"))
        app.command(name, context_settings=getattr(module, "SETTINGS", None))(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"midstep {__version__}")
        raise typer.Exit


def midstep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Everything between backward() and optimizer.step(), exactly."""

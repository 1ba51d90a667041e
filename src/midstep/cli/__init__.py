"""The command `midstep`: one module a command, each importing what it needs when it is run.

Exit codes: 0 fine, 1 found something, 2 could not do it. A bad argument gets one clear line on
stderr, never a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from .train import train

__all__ = ["app", "main"]

_COULD_NOT = 2
# typer carries a click of its own and exports only its leaves.
_UsageError = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="midstep",
    help="Everything between backward() and optimizer.step(), exactly.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help starts in a third of the time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(train)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from .. import __version__

        typer.echo(f"midstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Everything between backward() and optimizer.step(), exactly."""
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(_COULD_NOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code.

    Args:
        arguments: What stands after `midstep`; those of the process by default.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="midstep", standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        words = getattr(error, "format_message", error.__str__)()
        typer.echo(f"midstep: {words}", err=True)
        code = _COULD_NOT
    sys.exit(code or 0)

"""The command `midstep`: one module a command, and nothing of torch before a command needs it.

Exit codes: 0 fine, 1 found something, 2 could not do it; 128 plus the number of the signal when it
was stopped by one. What goes wrong is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main", "run"]


def run(arguments: Sequence[str], *, ends_process: bool = False) -> int:
    """Run the command.

    Args:
        arguments: What follows `midstep`.
        ends_process: The process ends with it, so nothing need be tidied up for what comes after.

    Returns:
        The exit code.

    Example:
        >>> run(["--version"])
        midstep ...
        0
    """
    if arguments[:1] == ["lint"]:  # without typer, which takes longer to load than most linting
        from .lint import lint_directly

        return lint_directly(arguments[1:])
    if arguments[:1] == ["audit"]:  # the same, since whoever audits waits for the script as well
        from .audit import asked_by, audit_directly

        if (asked := asked_by(arguments[1:])) is not None:
            return audit_directly(asked, ends_process=ends_process)
    from .application import invoke

    return invoke(arguments)


def main() -> None:
    """Run the command with the arguments of this process, and end it."""
    sys.exit(run(sys.argv[1:], ends_process=True))

"""Failures: one clear line on stderr and an exit code, whatever went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback as tracebacks
import warnings
from collections.abc import Callable, Iterator

from ..errors import MidstepError, RecipeError

__all__ = ["FAILED", "FINE", "FOUND", "INTERRUPTED", "attempt", "fail", "period"]

FINE = 0
FOUND = 1  # the command did what was asked, and what it found is not fine
FAILED = 2
INTERRUPTED = 128  # plus the number of the signal, as shells count


def attempt(
    action: Callable[[], int],
    *,
    traceback: bool,
    say: Callable[[str, BaseException], None] | None = None,
) -> int:
    """Run a command, and turn whatever it raises into one line and an exit code.

    Warnings are one line each, too.

    Args:
        action: Does the work and returns the exit code.
        traceback: Show the whole traceback, too.
        say: Writes the line, given the error, too; None to write it to stderr.

    Returns:
        The exit code.
    """
    say = say or (lambda message, _: fail(message))
    try:
        with _warnings_in_one_line(say):
            return action()
    except KeyboardInterrupt as error:
        say(" ".join(["interrupted.", *_notes(error)]), error)
        return INTERRUPTED + 2
    except BrokenPipeError as error:
        # Nobody reads any more; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(" ".join(["nobody reads its output any more.", *_notes(error)]), error)
        return FAILED
    except Exception as error:  # noqa: BLE001 - a command ends with a line, whatever the reason
        if traceback:
            tracebacks.print_exception(error)
        say(in_one_line(error, traceback=traceback), error)
        return FAILED


def fail(message: str) -> None:
    """Write the one line.

    Args:
        message: What is wrong and what to do.
    """
    sys.stderr.write(f"midstep: {message}\n")


def in_one_line(error: BaseException, *, traceback: bool = False) -> str:
    """Say what happened, where in the user's own code it happened, and what it means for the run.

    Args:
        error: What was raised; its notes are appended.
        traceback: Whether the reader has seen the traceback already.
    """
    from ..recipes.places import describe, is_refusal, place_of

    place = None if isinstance(error, MidstepError) else place_of(error)
    if place is not None:
        message = f"`{place}`: {describe(error)}"
    elif isinstance(error, OSError) and error.errno is not None:
        message = f"{f'`{error.filename}`: ' if error.filename else ''}{error.strerror}"
    elif is_refusal(error):
        message = str(error.args[0]) if error.args else type(error).__name__
    else:
        message = describe(error)
    is_users = isinstance(error, RecipeError) and error.__cause__ is not None
    explains_itself = isinstance(error, OSError) or (is_refusal(error) and not is_users)
    hint = [] if traceback or explains_itself else ["`--traceback` shows where."]
    return " ".join([period(" ".join(message.split())), *_notes(error), *hint])


def period(text: str) -> str:
    """End a sentence that has no end.

    Example:
        >>> period("no such file"), period("Which one?")
        ('no such file.', 'Which one?')
    """
    return text if text.endswith((".", "!", "?")) else f"{text}."


@contextlib.contextmanager
def _warnings_in_one_line(say: Callable[[str, BaseException], None]) -> Iterator[None]:
    def show(message: Warning | str, *_place: object, **_named: object) -> None:
        warning = message if isinstance(message, Warning) else UserWarning(message)
        say(f"warning: {' '.join(str(message).split())}", warning)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))

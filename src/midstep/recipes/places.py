"""Places: which line of the user's own code an error came through.

An error inside torch says little about the recipe that caused it; the last line of the recipe on
the way there says most.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["describe", "place_of"]

_NOT_THE_USERS = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def place_of(error: BaseException) -> str | None:
    """Find the user's line nearest to where an error was raised, as `file:line`.

    Code of midstep, of Python itself and of installed packages is not the user's.

    Returns:
        None where no line of the user's took part.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{_short(error.filename)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return None


def describe(error: BaseException) -> str:
    """Give kind and message of an error in one line.

    Example:
        >>> describe(KeyError("labels")), describe(ValueError())
        ("KeyError: 'labels'", 'ValueError')
    """
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A worker of a DataLoader sends its whole traceback as the message: what happened comes last.
    if "Original Traceback" in text:
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"


def _is_users(filename: str) -> bool:
    path = Path(filename)
    # A name such as `<string>` or `<frozen importlib._bootstrap>` is no file that could be opened.
    return path.is_file() and not any(path.is_relative_to(root) for root in _NOT_THE_USERS)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

"""Places: which line of the user's own code an error came through.

An error inside torch says little about the recipe that caused it; the last line of the recipe on
the way there says most.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

from ..errors import MidstepError

__all__ = ["describe", "is_refusal", "place_of"]

_MIDSTEP = Path(__file__).parents[1]
_NOT_THE_USERS = (
    _MIDSTEP,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


# Another kind of error is a fault of midstep, and its message alone would say too little.
_REFUSALS = (ValueError, TypeError, KeyError, NotImplementedError, FileExistsError)
_TRACEBACK_LINE = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


def place_of(error: BaseException) -> str | None:
    """Find the user's line nearest to where an error was raised, as `file:line`.

    Code of midstep, of Python itself and of installed packages is not the user's.

    Returns:
        None where no line of the user's took part.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # A worker of a DataLoader sends its traceback as text, which goes on where this one ends.
    frames += [(name, int(line)) for name, line in _TRACEBACK_LINE.findall(str(error))]
    for filename, line in reversed(frames):
        if _is_users(filename):
            return f"{_short(filename)}:{line}"
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
    if _TRACEBACK_LINE.search(text):
        return lines[-1]  # the text of a traceback, whose last line says what happened
    return f"{type(error).__name__}: {lines[0]}"


def is_refusal(error: BaseException) -> bool:
    """Whether midstep itself refused something, so that its message says all there is to say."""
    frames = traceback.extract_tb(error.__traceback__)
    is_own = bool(frames) and Path(frames[-1].filename).is_relative_to(_MIDSTEP)
    return isinstance(error, MidstepError) or (is_own and isinstance(error, _REFUSALS))


def _is_users(filename: str) -> bool:
    path = Path(filename)
    # A name such as `<string>` or `<frozen importlib._bootstrap>` is no file that could be opened.
    return path.is_file() and not any(path.is_relative_to(root) for root in _NOT_THE_USERS)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

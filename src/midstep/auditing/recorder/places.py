"""Places: the line of the user's code that a call came from."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from ..events import Place

__all__ = ["Places"]

_PACKAGE = str(Path(__file__).parents[2])


class Places:
    """Finds the innermost frame that is neither a library nor this package.

    Where a library is what runs (`midstep audit -m package.train`), its folder is named in `own`.

    Args:
        own: Folders and files that are the user's although they lie among the libraries.

    Example:
        >>> Places().here()
        Place(file='<doctest ...', line=1, function='<module>')
    """

    __slots__ = ("_is_library", "_libraries", "own")

    def __init__(self, own: tuple[str, ...] = ()) -> None:
        self.own = own
        paths = sysconfig.get_paths()
        names = ("stdlib", "platstdlib", "purelib", "platlib")
        self._libraries = (_PACKAGE + os.sep, *{paths[name] + os.sep for name in names})
        self._is_library: dict[str, bool] = {}

    def here(self) -> Place | None:
        """Return the line that is being run; None if no frame is the user's."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - a stack is walked no other way
        known = self._is_library
        while frame is not None:
            file = frame.f_code.co_filename
            is_library = known.get(file)
            if is_library is None:
                is_library = known[file] = self._judge(file)
            if not is_library:
                return Place(file, frame.f_lineno, frame.f_code.co_name)
            frame = frame.f_back
        return None

    def route(self, most: int = 6) -> tuple[Place, ...]:
        """Return the user's lines that are being run, the innermost first.

        Args:
            most: How many at most.
        """
        found: list[Place] = []
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as above
        while frame is not None and len(found) < most:
            file = frame.f_code.co_filename
            if file not in self._is_library:
                self._is_library[file] = self._judge(file)
            if not self._is_library[file]:
                found.append(Place(file, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return tuple(found)

    def _judge(self, file: str) -> bool:
        if file.startswith("<"):
            return not file.startswith(("<doctest", "<string>", "<stdin>", "<ipython"))
        path = os.path.abspath(file)  # noqa: PTH100 - no link is followed: it would hide the folder
        if any(path == own or path.startswith(own + os.sep) for own in self.own):
            return False
        return path.startswith(self._libraries)

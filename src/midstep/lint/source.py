"""Read code: a file or a notebook, its syntax tree, and the comments that silence findings.

A notebook is read as one text, since its cells share their names; a line is given back as the line
of its cell. Nothing is run or imported.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..findings import Suppressions

__all__ = ["Source", "UnreadableFile", "python_files", "read"]

SUFFIXES = (".py", ".ipynb")
# Folders that hold other people's code, or no code.
SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv", "env"}
# `%timeit x`, `!pip install`, `?torch`, `files = !ls`: lines that only a notebook understands.
MAGIC = re.compile(r"^\s*(?:[%!?]|[\w, ]+=\s*[!%])")


class UnreadableFile(ValueError):
    """A file that cannot be read as Python; the message says where and why."""


class Source:
    r"""The text of one file or notebook, parsed.

    Args:
        path: As the user named it; it stands in every finding.
        text: Python.
        cells: For a notebook, the number of the cell and the line in it, of each line of `text`.
        encoding: Of the file, to write it as it was.

    Raises:
        UnreadableFile: The text is not Python.

    Example:
        >>> Source("train.py", "x = 1\n").place(1)
        (None, 1)
    """

    def __init__(
        self,
        path: str,
        text: str,
        cells: Sequence[tuple[int, int]] = (),
        *,
        encoding: str = "utf-8",
    ) -> None:
        self.path, self.text, self._cells, self.encoding = path, text, cells, encoding
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an invalid escape: no matter of ours
                self.tree = ast.parse(text)
        except SyntaxError as error:
            cell, line = self.place(error.lineno or 1)
            where = f"line {line}" if cell is None else f"cell {cell}, line {line}"
            raise UnreadableFile(f"{where}: {error.msg}.") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise UnreadableFile(f"cannot be parsed: {error}.") from error
        self.suppressions = Suppressions(text)

    def place(self, line: int) -> tuple[int | None, int]:
        """The cell (None outside notebooks) and the line in it."""
        if not self._cells:
            return None, line
        return self._cells[min(line, len(self._cells)) - 1]


def read(path: Path, *, shown_as: str | None = None) -> Source:
    """Read a `.py` file or a notebook.

    Args:
        path: Where it is.
        shown_as: Its name in findings; the path itself when None.

    Raises:
        UnreadableFile: It cannot be opened, decoded or parsed.
    """
    name = str(path) if shown_as is None else shown_as
    try:
        data = path.read_bytes()
        if path.suffix == ".ipynb":
            return _notebook(name, data.decode("utf-8"))
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Source(name, data.decode(encoding), encoding=encoding)
    except OSError as error:
        raise UnreadableFile(f"{error.strerror}.") from error
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise UnreadableFile(f"not the text that its encoding promises: {error}.") from error


def python_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Every file to read: those that are named, and all Python files and notebooks in folders.

    Args:
        paths: Files and folders.
    """
    for path in paths:
        if path.is_dir():
            yield from sorted(_in_folder(path))
        else:
            yield path


def _in_folder(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink() and path.is_dir():
            continue  # it may lead back
        if path.is_dir():
            if path.name not in SKIPPED and not path.name.startswith("."):
                yield from _in_folder(path)
        elif path.suffix in SUFFIXES:
            yield path


def _notebook(name: str, text: str) -> Source:
    try:
        cells = json.loads(text)["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(f"not a notebook: {error!r}.") from error
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, code in enumerate(codes, start=1):
        for line, written in enumerate(_without_magic(code.splitlines()), start=1):
            lines.append(written)
            places.append((number, line))
    return Source(name, "\n".join([*lines, ""]), places or [(1, 1)])


def _without_magic(lines: list[str]) -> list[str]:
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("%%"), lines)
    if any(re.match("%%(?!time|capture)", line) for line in head):
        return ["pass"] * len(lines)  # a cell in another language
    written: list[str] = []
    indent, goes_on = "", False
    for line in lines:
        is_magic = goes_on or bool(MAGIC.match(line))
        if not goes_on:
            indent = line[: len(line) - len(line.lstrip())]
        goes_on = is_magic and line.rstrip().endswith("\\")
        written.append(f"{indent}pass" if is_magic else line)
    return written

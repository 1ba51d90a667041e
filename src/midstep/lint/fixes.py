"""Mend what can be mended safely: a few changes, each at one place, that a second look confirms.

A change is made only where its names are in sight, and kept only if the defect is gone afterwards
and none has come.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .linting import Linted, lint
from .rules import Edit
from .source import Source, UnreadableFile

__all__ = ["fixed"]


def fixed(source: Source) -> tuple[str, int]:
    """Mend a file.

    Args:
        source: A file, not a notebook.

    Returns:
        The new text, and how many defects are gone from it.

    Example:
        >>> text = '''
        ... for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     total += loss
        ... '''
        >>> new, number = fixed(Source("train.py", text))
        >>> number, new.splitlines()[-1]
        (1, '    total += loss.detach()')
    """
    number, tried = 0, set[tuple[str, str]]()
    while True:
        linted = lint(source)
        step = next(_steps(source, linted, tried), None)
        if step is None:
            return source.text, number
        source, gone = step
        number += gone


def _steps(
    source: Source, linted: Linted, tried: set[tuple[str, str]]
) -> Iterator[tuple[Source, int]]:
    lines = source.text.encode().splitlines()
    for (code, line), edits in linted.edits.items():
        key = (code, lines[line - 1].decode().strip() + str(line))
        if key in tried:
            continue
        tried.add(key)
        text = _changed(source, edits)
        if text is None:
            continue
        try:
            new = Source(source.path, text)
        except UnreadableFile:
            continue
        before, after = _count(linted), _count(lint(new))
        if after[code] < before[code] and all(after[c] <= before.get(c, 0) for c in after):
            yield new, before[code] - after[code]


class _Counts(dict[str, int]):
    def __missing__(self, code: str) -> int:
        return 0


def _count(linted: Linted) -> _Counts:
    counts = _Counts()
    for finding in linted.findings:
        counts[finding.defect.code] += 1
    return counts


def _changed(source: Source, edits: Iterable[Edit]) -> str | None:
    """The text after some edits; None where one of them is not safe."""
    data = source.text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    changes: list[tuple[int, int, str]] = []
    for edit in edits:
        change = (
            _before(source, edit, starts) if edit.is_line_before else _inside(edit, data, starts)
        )
        if change is None:
            return None
        changes.append(change)
    for first, last, text in sorted(changes, reverse=True):
        data = data[:first] + text.encode() + data[last:]
    return data.decode()


def _inside(edit: Edit, data: bytes, starts: list[int]) -> tuple[int, int, str] | None:
    node = edit.node
    if not isinstance(node, ast.expr) or node.end_lineno is None or node.end_col_offset is None:
        return None
    first = starts[node.lineno - 1] + node.col_offset
    last = starts[node.end_lineno - 1] + node.end_col_offset
    old = data[first:last].decode()
    if "{}" not in edit.text and "#" in old:
        return None  # a comment would be lost
    return first, last, edit.text.replace("{}", old)


def _before(source: Source, edit: Edit, starts: list[int]) -> tuple[int, int, str] | None:
    """A line in front of the statement, where the names of the new line are in sight."""
    around = _around(source.tree, edit.node)
    beside = _around(source.tree, edit.beside) if edit.beside is not None else around
    if not around or _function_of(around) is not _function_of(beside):
        return None
    statement = next(node for node in reversed(around) if isinstance(node, ast.stmt))
    # Bytes are cut where Python's own reader cuts: a form feed ends no line.
    line = source.text.encode().splitlines(keepends=True)[statement.lineno - 1].decode()
    indent = line[: len(line) - len(line.lstrip())]
    end = "\r\n" if line.endswith("\r\n") else "\n"
    if len(indent.encode()) != statement.col_offset:
        return None  # `if x: clip(...)` on one line
    first = starts[statement.lineno - 1]
    return first, first, f"{indent}{edit.text}{end}"


def _around(tree: ast.AST, wanted: ast.AST) -> list[ast.AST]:
    """The nodes from the module down to one."""
    if tree is wanted:
        return [tree]
    for child in ast.iter_child_nodes(tree):
        if inner := _around(child, wanted):
            return [tree, *inner]
    return []


def _function_of(around: list[ast.AST]) -> ast.AST | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return next((node for node in reversed(around) if isinstance(node, kinds)), None)

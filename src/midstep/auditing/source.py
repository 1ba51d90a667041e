"""Source: the lines around a measured fault, read from the text of the script.

A run shows on which line backward was called. Where the fault is on another line (the loss that is
a mean, the condition that ends a window), the text between tells which. Nothing is found by text
alone here: it only says where.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator

from .events import Place

__all__ = [
    "Source",
    "body_of",
    "division_of",
    "drops_result",
    "gate_of",
    "is_periodic",
    "is_tried",
    "loss_of",
    "own_division_of",
    "read",
    "remainder_of",
    "suppressing_of",
    "total_of",
]

PASSAGES = frozenset({"scale", "backward", "to", "float", "squeeze", "view", "size"})
MAX_LINKS = 12  # assignments followed from a loss to where it began


class Source:
    """The syntax tree of one file, with the parent of each node.

    Args:
        text: Of the file.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    def scope(self, line: int) -> ast.AST:
        """Return the innermost function around a line, or the module."""
        found: ast.AST = self.tree
        for node in ast.walk(self.tree):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if is_function and _covers(node, line):
                found = node
        return found

    def statement(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that covers a line."""
        found: ast.stmt | None = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and _covers(node, line):
                found = node if found is None or node.lineno >= found.lineno else found
        return found

    def around(self, line: int, kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
        """Yield the nodes of some kinds around a line, the innermost first, within its function."""
        node: ast.AST | None = self.statement(line)
        while node is not None and not isinstance(node, ast.FunctionDef | ast.Module):
            if isinstance(node, kinds):
                yield node
            node = self.parents.get(node)

    def condition(self, line: int) -> int:
        """Return the line of the innermost `if` around a line, or the line itself."""
        gate = next(self.around(line, (ast.If,)), None) or self._guard(line)
        return line if gate is None else gate.lineno  # type: ignore[attr-defined]

    def _guard(self, line: int) -> ast.AST | None:
        """The `if ...: continue` that stands before a line in the same loop."""
        statement = self.statement(line)
        loop = None if statement is None else self.parents.get(statement)
        body = loop.body if isinstance(loop, ast.For | ast.While) else []
        before = [node for node in body if isinstance(node, ast.If) and node.lineno < line]
        guards = [node for node in before if isinstance(node.body[-1], ast.Continue)]
        return guards[-1] if guards else None

    def chain(self, line: int) -> list[ast.expr]:
        """Return the expressions a loss came through, the last first.

        Args:
            line: Of the backward.
        """
        statement = self.statement(line)
        if statement is None:
            return []
        scope = self.scope(line)
        links = [
            node.args[0] if node.args else node.func.value
            for node in ast.walk(statement)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.endswith("backward")
        ][:1]
        end = line
        while links and len(links) < MAX_LINKS:
            found = _definition(scope, _names(links[-1]), end)
            if found is None:
                break
            assert found.value is not None
            links.append(found.value)
            end = found.lineno
        return links


def _definition(
    scope: ast.AST, wanted: set[str], before: int
) -> ast.Assign | ast.AugAssign | ast.AnnAssign | None:
    """The last assignment before a line to one of some names."""
    best: ast.Assign | ast.AugAssign | ast.AnnAssign | None = None
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        made = {name for target in targets for name in _names(target)}
        is_it = node.value is not None and node.lineno < before and made & wanted
        if is_it and (best is None or node.lineno > best.lineno):
            best = node
    return best


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return bool(first <= line <= last)


def _raises(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Raise) for inner in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _divides(node: ast.AST) -> bool:
    parent_divides = any(
        isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div) for inner in ast.walk(node)
    )
    return parent_divides or any(
        isinstance(inner, ast.Attribute) and inner.attr in {"div", "div_"}
        for inner in ast.walk(node)
    )


def _makes_loss(node: ast.AST) -> bool:
    """Whether an expression calls something that is more than a passage."""
    return any(
        isinstance(inner, ast.Call)
        and not (isinstance(inner.func, ast.Attribute) and inner.func.attr in PASSAGES)
        for inner in ast.walk(node)
    )


@functools.lru_cache(maxsize=64)
def read(file: str) -> Source | None:
    """Read a file; None where it cannot be read as Python.

    Args:
        file: As a frame names it.
    """
    text = "".join(linecache.getlines(file))
    if not text:
        return None
    try:
        return Source(text)
    except (SyntaxError, ValueError):
        return None


def gate_of(place: Place | None) -> Place | None:
    """Return the condition around a place, which decides when a window ends.

    Args:
        place: Of a step.
    """
    if place is None or (source := read(place.file)) is None:
        return place
    return place._replace(line=source.condition(place.line))


def loss_of(place: Place | None) -> Place | None:
    """Return the line on which the loss of a backward was computed.

    Args:
        place: Of the backward.
    """
    return _first_link(place, _makes_loss)


def division_of(place: Place | None) -> Place | None:
    """Return the line on which the loss of a backward was divided last.

    Args:
        place: Of the backward.
    """
    return _first_link(place, _divides)


def own_division_of(place: Place | None) -> Place | None:
    """Return the line on which a loss was divided by its own count: the first division of all.

    Args:
        place: Of the backward.
    """
    if place is None or (source := read(place.file)) is None:
        return place
    found = place
    for link in source.chain(place.line):
        if _divides(link) or _makes_loss(link):
            found = place._replace(line=link.lineno)
        if _makes_loss(link):
            break
    return found


def _first_link(place: Place | None, is_it: Callable[[ast.AST], bool]) -> Place | None:
    if place is None or (source := read(place.file)) is None:
        return place
    for link in source.chain(place.line):
        statement = source.statement(link.lineno)
        whole = statement if isinstance(statement, ast.AugAssign) else link
        is_division = isinstance(whole, ast.AugAssign) and isinstance(whole.op, ast.Div)
        if is_it(link) or (is_it is _divides and is_division):
            return place._replace(line=link.lineno)
    return place


def is_tried(place: Place | None) -> bool:
    """Whether a line stands in a `try` that would catch the error of a norm that is not finite.

    Args:
        place: Of the clip.
    """
    if place is None or (source := read(place.file)) is None:
        return False
    for node in source.around(place.line, (ast.Try,)):
        assert isinstance(node, ast.Try)
        in_body = any(s.lineno <= place.line <= (s.end_lineno or 0) for s in node.body)
        silent = [h for h in node.handlers if not _raises(h)]
        caught = {name for h in silent if h.type is not None for name in _names(h.type)}
        if in_body and "RuntimeError" in caught:
            return True
    return False


def remainder_of(place: Place | None, divisor: float) -> bool:
    """Whether the loss is divided by a name that is the length of a window.

    It is if the same file takes remainders by it, or if it says so itself.

    Args:
        place: Of the backward.
        divisor: What the loss was divided by.
    """
    if place is None or (source := read(place.file)) is None:
        return False
    names, numbers = set[str](), set[float]()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            names.add(ast.unparse(node.right))
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, int):
                numbers.add(float(node.right.value))
    if divisor in numbers:
        return True
    divisors = [
        ast.unparse(inner.right)
        for link in source.chain(place.line)
        for inner in ast.walk(link)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div)
    ]
    return any(divisor in names or "accum" in divisor.lower() for divisor in divisors)


def total_of(place: Place | None) -> Place | None:
    """Return the line that adds a loss to a running total, near its backward.

    Args:
        place: Of the backward.
    """
    if place is None or (source := read(place.file)) is None:
        return place
    statement = source.statement(place.line)
    names = set[str]() if statement is None else _names(statement)
    for node in ast.walk(source.scope(place.line)):
        is_sum = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
        is_append = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
        )
        is_rebound = (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, ast.Add)
            and bool(_names(node.targets[0]) & _names(node.value))
        )
        if not is_sum and not is_append and not is_rebound:
            continue
        value = node if is_append else node.value  # type: ignore[attr-defined]
        if _names(value) & names and (is_append or not _makes_loss(value)):
            return place._replace(line=node.lineno)  # type: ignore[attr-defined]
    return place


def suppressing_of(place: Place | None) -> Place | None:
    """Return the `with` around a line, which keeps it from summing over ranks.

    Args:
        place: Of the backward.
    """
    if place is None or (source := read(place.file)) is None:
        return place
    node = next(source.around(place.line, (ast.With,)), None)
    return place if node is None else place._replace(line=node.lineno)  # type: ignore[attr-defined]


def body_of(place: Place | None) -> Place | None:
    """Return the first line of what an `if` on a line guards, or the line itself.

    Args:
        place: Of the condition.
    """
    if place is None or (source := read(place.file)) is None:
        return place
    statement = source.statement(place.line)
    if not isinstance(statement, ast.If):
        return place
    return place._replace(line=statement.body[0].lineno)


def is_periodic(place: Place | None) -> bool:
    """Whether a line stands under a condition on a remainder: once a window.

    Args:
        place: Of a clearing.
    """
    if place is None or (source := read(place.file)) is None:
        return False
    return any(
        isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod)
        for gate in source.around(place.line, (ast.If,))
        if isinstance(gate, ast.If)
        for inner in ast.walk(gate.test)
    )


def drops_result(place: Place | None) -> bool:
    """Whether what the call on a line returns is thrown away.

    Args:
        place: Of a clip.
    """
    if place is None or (source := read(place.file)) is None:
        return True
    statement = source.statement(place.line)
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
    return "clip" in name

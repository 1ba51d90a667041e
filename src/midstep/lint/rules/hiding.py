"""MS603 of numbers: a loss is read into a name, which is logged only where it is finite."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..evaluator import text_of
from ..loops import Update
from ..trace import Act
from .report import loss_behind

__all__ = ["left_out_numbers"]

WORDS_OF_LOGS = {
    *("append", "extend", "add", "update", "put", "write", "print", "info", "debug", "log"),
    *("add_scalar", "add_scalars", "log_metric", "log_dict", "set_postfix", "set_description"),
}


def left_out_numbers(update: Update) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Find `value = loss.item()`, then `if value == value: log(value)`, and its relatives.

    Args:
        update: One optimizer in one place, whose step is taken whatever the loss is.

    Returns:
        Where something is left out, and the test that leaves it out.
    """
    loop = update.place.loop
    if loop is None or any(step.by is not None for step in update.steps):
        return  # a scaler takes no step where the loss is not finite
    reads = _reads(update)
    names = _names_of(loop.node, reads) | {text_of(read) for read in reads}
    asked: dict[str, list[ast.AST]] = {}
    for node in ast.walk(loop.node):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            for part in ast.walk(node.test):
                question = _question(part) if isinstance(part, ast.expr) else None
                if question is not None and not _is_under_not(node.test, part):
                    asked.setdefault(question[0], []).append(node)
    for name, nodes in asked.items():
        # Who asks twice may count what was left out.
        if name in names and len(nodes) == 1 and not _is_told(loop.node, nodes[0], name, reads):
            place = _left_out(loop.node, nodes[0], name)
            if place is not None:
                yield place, nodes[0].test  # type: ignore[attr-defined]


def _reads(update: Update) -> list[ast.expr]:
    """Where a loss of this update is read as a number."""
    own = [loss_behind(event.subject) for event in update.place.events(Act.BACKWARD)]
    losses = [loss for loss in own if loss is not None]
    found: list[ast.expr] = []
    for event in update.place.events(Act.READ):
        read = loss_behind(event.subject)
        is_own = any(read is loss or read in loss.roots for loss in losses)
        if is_own and isinstance(event.node, ast.expr):
            found.append(event.node)
    return found


def _names_of(loop: ast.AST, reads: list[ast.expr]) -> set[str]:
    """The names that stand for nothing in this loop but such a number."""
    nodes = {id(read) for read in reads}
    given: dict[str, list[ast.expr]] = {}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and not isinstance(node.value, ast.Constant):
                given.setdefault(target.id, []).append(node.value)
    return {name for name, values in given.items() if all(id(value) in nodes for value in values)}


def _question(test: ast.expr) -> tuple[str, bool] | None:
    """What is asked about, and whether the answer yes means that it is a number."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _question(test.operand)
        return None if inner is None else (inner[0], not inner[1])
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        same = text_of(test.left) == text_of(test.comparators[0])
        is_it = same and isinstance(test.ops[0], ast.Eq | ast.NotEq)
        return (text_of(test.left), isinstance(test.ops[0], ast.Eq)) if is_it else None
    if isinstance(test, ast.Call) and len(test.args) == 1 and not test.keywords:
        word = text_of(test.func).rpartition(".")[2]
        if word in {"isfinite", "isnan", "isinf"}:
            return text_of(test.args[0]), word == "isfinite"
    return None


def _is_under_not(test: ast.expr, part: ast.AST) -> bool:
    """Whether the question is the inner part of one that was seen already."""
    return any(
        isinstance(node, ast.UnaryOp) and node.operand is part and _question(node) is not None
        for node in ast.walk(test)
    )


def _left_out(loop: ast.AST, node: ast.AST, name: str) -> ast.AST | None:
    if isinstance(node, ast.IfExp):
        if _question(node.test) == (name, True):
            kept, other = node.body, node.orelse
        elif _question(node.test) == (name, False):
            kept, other = node.orelse, node.body
        else:
            return None
        is_plain = text_of(kept) == name and isinstance(other, ast.Constant) and other.value == 0
        logs = [part for part in ast.walk(loop) if isinstance(part, ast.stmt) and _logs(part)]
        return next((log for log in logs if is_plain and _holds(log, node)), None)
    if not isinstance(node, ast.If) or node.orelse:
        return None
    if _question(node.test) == (name, True):
        uses = [line for line in node.body if _logs(line) and _names(line, name)]
        return uses[0] if uses and all(map(_logs, node.body)) else None
    first = node.body[0]
    is_number = isinstance(first, ast.Assign) and isinstance(first.value, ast.Constant)
    if _question(node.test) != (name, False) or len(node.body) > 1 or not is_number:
        return None
    assert isinstance(first, ast.Assign)
    later = (p for p in ast.walk(loop) if isinstance(p, ast.stmt) and p.lineno > first.lineno)
    is_logged = any(_logs(part) and _names(part, name) for part in later)
    return first if is_logged and text_of(first.targets[0]) == name else None


def _is_told(loop: ast.AST, asks: ast.AST, name: str, reads: list[ast.expr]) -> bool:
    """Whether the number is logged outside of the question as well, as it is."""
    words = {name, *(text_of(read) for read in reads)}
    last = asks.lineno if _replaces(asks) else getattr(loop, "end_lineno", 0)  # type: ignore[attr-defined]
    return any(
        isinstance(part, ast.stmt)
        and _logs(part)
        and part.lineno <= last
        and not _holds(part, asks)
        and not _holds(asks, part)
        and any(_names(part, word) for word in words)
        for part in ast.walk(loop)
    )


def _replaces(asks: ast.AST) -> bool:
    return isinstance(asks, ast.If) and isinstance(asks.body[0], ast.Assign)


def _logs(node: ast.stmt) -> bool:
    """Whether a statement only adds to a total, a list or a log."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Add)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return text_of(node.value.func).rpartition(".")[2] in WORDS_OF_LOGS
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
        and text_of(node.value.left) == text_of(node.targets[0])
    )


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _names(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.expr) and text_of(part) == name for part in ast.walk(node))

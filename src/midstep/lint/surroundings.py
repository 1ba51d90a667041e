"""What a file defines, before it is read in order: functions, classes, attributes that change."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Names", "names_of", "stored_in"]

# A function in which none of these is called has no part in a step.
TRIGGERS = {
    *("backward", "manual_backward", "step", "unscale_", "zero_grad", "clip_grad_norm_"),
    *("clip_grad_value_", "clip_gradients", "no_sync"),
}


class Names(NamedTuple):
    """What a file defines.

    Args:
        definitions: Imports, functions and classes of the module, wherever they stand in it.
        functions: Functions with a part in a step, each with the classes and functions around it;
            first, from the end of the file, those that only call such functions by name.
        stored: How often an attribute of that name is assigned.
        increased: Attributes that something is added to.
    """

    definitions: list[ast.stmt]
    functions: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, list[str]]]
    stored: Counter[str]
    increased: set[str]


def names_of(tree: ast.Module) -> Names:
    """Look through a whole file once.

    Args:
        tree: Its syntax tree.
    """
    stored: Counter[str] = Counter()
    increased: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            stored[node.attr] += 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            increased.add(node.target.attr)
    functions = list(_functions(tree, []))
    parts = [(function, owner) for function, owner in functions if _has_part(function)]
    named = {function.name for function, owner in parts if not owner}
    callers = [pair for pair in functions if pair not in parts and _calls(pair[0], named)]
    definitions = list(_definitions(tree.body))
    return Names(definitions, [*reversed(callers), *parts], stored, increased)


def _definitions(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in statements:
        if isinstance(
            node,
            ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        ):
            yield node
        elif isinstance(node, ast.If):
            yield from _definitions(node.body)
            yield from _definitions(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _definitions(node.body)


def _functions(
    node: ast.AST, owner: list[str]
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, list[str]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, [*owner, child.name])
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, owner
            # What is defined inside is reached by a call, or by nobody.
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, owner)


def _has_part(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            func = node.func
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if name in TRIGGERS:
                return True
    return False


def _calls(function: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        for node in ast.walk(function)
    )


class Stored(NamedTuple):
    """How names are assigned inside a loop."""

    assigned: Counter[str]
    increased: Counter[str]  # by exactly one
    constant: Counter[str]  # to a number that is written out


def stored_in(statements: list[ast.stmt]) -> Stored:
    """Find the names that a piece of code assigns.

    Args:
        statements: The body of a loop.
    """
    assigned: Counter[str] = Counter()
    increased: Counter[str] = Counter()
    constant: Counter[str] = Counter()
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned[node.id] += 1
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            by_one = isinstance(node.value, ast.Constant) and node.value.value == 1
            if by_one and isinstance(node.op, ast.Add):
                increased[node.target.id] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    constant[target.id] += 1
        waiting += ast.iter_child_nodes(node)
    return Stored(assigned, increased, constant)

"""Words of gradients: `p.grad` under another name, and the sum of its squares by hand."""

from __future__ import annotations

import ast
import re

from .evaluator import Evaluator, text_of
from .values import key_of

__all__ = ["in_full", "is_squared_gradient"]

SQUARED = re.compile(
    r"\.grad\b.*(\.pow\(2|\.square\(|\*\* ?2)"
    r"|\b(square|pow)\([^()]*\.grad\b"
    r"|(?P<one>[\w.\[\]]*\.grad[\w.()]*) \* (?P=one)"
)


def in_full(reader: Evaluator, node: ast.expr) -> str:
    """The words of an expression, after what the name that it begins with stands for.

    Args:
        reader: Knows the names.
        node: An expression.
    """
    base = node
    while isinstance(base, ast.Attribute | ast.Call | ast.BinOp | ast.Subscript):
        if isinstance(base, ast.Call):
            is_method = isinstance(base.func, ast.Attribute) and text_of(base.func.value) != "torch"
            base = base.func if is_method or not base.args else base.args[0]
        else:
            base = base.left if isinstance(base, ast.BinOp) else base.value
    meant = key_of(reader.evaluate(base)) if isinstance(base, ast.Name) else ""
    words = text_of(node)
    if meant.endswith(".grad") or ".grad." in meant:
        assert isinstance(base, ast.Name)
        words = re.sub(rf"(?<![\w.]){base.id}\b", lambda _: meant, words)
    return words


def is_squared_gradient(reader: Evaluator, node: ast.expr) -> bool:
    """Whether an expression is made of the squares of a gradient.

    Args:
        reader: Knows the names.
        node: What is summed, or the `sum` of it.
    """
    return bool(SQUARED.search(in_full(reader, node)))

"""Arithmetic on what is not known: what a loss was divided by, which remainder was taken."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from .evaluator import text_of
from .values import (
    Const,
    Index,
    Inverse,
    Items,
    Kind,
    Length,
    Loss,
    Params,
    Remainder,
    Scaled,
    Unknown,
    Value,
    key_of,
)

__all__ = ["combine", "divided", "multiplied", "summed"]

NUMBERS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def combine(op: ast.operator, left: Value, right: Value, node: ast.expr) -> Value:
    """Say what `left op right` stands for.

    Args:
        op: The operator.
        left: What stands left of it.
        right: What stands right of it.
        node: The expression, for its words and its place.
    """
    if isinstance(left, Const) and isinstance(right, Const):
        return _number(op, left, right, node)
    if isinstance(op, ast.Mod):
        return Remainder(left, right) if _counts(left) else Unknown(text_of(node))
    if isinstance(op, ast.Div):
        return divided(left, right, node)
    if isinstance(op, ast.Mult):
        return multiplied(left, right, node)
    if isinstance(op, ast.Add | ast.Sub):
        return _added(op, left, right, node)
    if isinstance(op, ast.Pow) and isinstance(left, Loss | Unknown):
        return Loss(Kind.OTHER, node, roots=(left,))
    return Unknown(text_of(node))


def _number(op: ast.operator, left: Const, right: Const, node: ast.expr) -> Value:
    function = NUMBERS.get(type(op))
    numbers = (int, float)
    if function and isinstance(left.value, numbers) and isinstance(right.value, numbers):
        try:
            return Const(function(left.value, right.value))
        except (ArithmeticError, ValueError):
            pass
    return Unknown(text_of(node))


def _counts(value: Value) -> bool:
    return isinstance(value, Index | Unknown | Length)


def divided(left: Value, right: Value, node: ast.expr) -> Value:
    """Say what a quotient stands for.

    Args:
        left: What is divided.
        right: The divisor.
        node: The expression.
    """
    if isinstance(left, Const) and left.value == 1:
        return Inverse(right)
    if isinstance(left, Scaled):
        return Scaled(divided(left.loss, right, node), left.scaler)
    if isinstance(left, Unknown):
        left = Loss(Kind.OTHER, node, roots=(left,))
    if not isinstance(left, Loss):
        return Unknown(text_of(node))
    changes: dict[str, object] = {"divisors": (*left.divisors, (right, node))}
    if left.kind is Kind.SUM and left.masked and is_count(right):
        changes["unequal"] = left.unequal or "a mask chooses what it is a mean of"
        changes["kind"] = Kind.MEAN
    return left.with_(**changes)


def is_count(value: Value) -> bool:
    """Whether a value is a sum over this microbatch: `mask.sum()`.

    Args:
        value: A divisor.
    """
    return isinstance(value, Loss) and value.kind is Kind.SUM


def multiplied(left: Value, right: Value, node: ast.expr) -> Value:
    """Say what a product stands for.

    Args:
        left: One factor.
        right: The other.
        node: The expression.
    """
    if isinstance(left, Inverse):
        left, right = right, left
    if isinstance(right, Inverse):
        return divided(left, right.of, node)
    if not isinstance(left, Loss) and isinstance(right, Loss):
        left, right = right, left
    if isinstance(left, Scaled):
        return Scaled(multiplied(left.loss, right, node), left.scaler)
    if isinstance(left, Loss):
        times = (*left.times, key_of(right))
        if left.detached and isinstance(right, Unknown):  # a mean times its count
            return Loss(Kind.OTHER, node, scaled=True, roots=(right, left), times=(key_of(left),))
        if left.kind in {Kind.ELEMENTS, Kind.OTHER}:
            return left.with_(masked=True, times=times)
        return left.with_(scaled=True, times=times)
    if isinstance(left, Unknown) and isinstance(right, Unknown):
        return Loss(Kind.OTHER, node, masked=True, roots=(left, right))
    return Unknown(text_of(node))


def _added(op: ast.operator, left: Value, right: Value, node: ast.expr) -> Value:
    if isinstance(left, Index) and isinstance(right, Const) and type(right.value) is int:
        plus = right.value if isinstance(op, ast.Add) else -right.value
        return Index(
            left.key, left.loop, left.start, left.offset + plus, left.survives, left.resets
        )
    if isinstance(right, Index) and isinstance(left, Const) and isinstance(op, ast.Add):
        return _added(op, right, left, node)
    if isinstance(left, Length) and isinstance(right, Const) and type(right.value) is int:
        plus = right.value if isinstance(op, ast.Add) else -right.value
        return Length(left.of, left.plus + plus)
    if isinstance(left, Unknown) and isinstance(right, Const) and type(right.value) is int:
        plus = right.value if isinstance(op, ast.Add) else -right.value
        return Index(left.key, -1, None, plus)
    if isinstance(op, ast.Add):
        if (joined := summed(left, right)) is not None:
            return joined
        return _joined(left, right, node)
    if isinstance(left, Loss):
        return left.with_(kind=Kind.OTHER) if left.kind is not Kind.ELEMENTS else left
    return Loss(Kind.OTHER, node, roots=(left, right))


def summed(left: Value, right: Value) -> Value | None:
    """Say what the sum of two terms of a loss stands for, or None if neither is one.

    Args:
        left: One term.
        right: The other.
    """
    if isinstance(left, Const) and isinstance(right, Loss):
        left, right = right, left
    if not isinstance(left, Loss):
        if not isinstance(right, Loss):
            return None
        left, right = right, left
    assert isinstance(left, Loss)
    if isinstance(right, Const):
        return left
    if not isinstance(right, Loss):
        return left.with_(kind=Kind.OTHER, roots=(left, *left.roots, right))
    kind = left.kind if left.kind is right.kind else Kind.OTHER
    longer = left if len(left.divisors) >= len(right.divisors) else right
    same = {key_of(d) for d, _ in left.divisors} == {key_of(d) for d, _ in right.divisors}
    return longer.with_(
        kind=kind,
        unequal=left.unequal or right.unequal,
        across_rows=left.across_rows or right.across_rows,
        scaled=left.scaled or right.scaled or not same,
        roots=(left, right, *left.roots, *right.roots),
    )


def _joined(left: Value, right: Value, node: ast.expr) -> Value:
    if isinstance(left, Params) and isinstance(right, Params):
        return Params(
            (*left.modules, *right.modules),
            one_shot=False,
            whole=left.whole and right.whole,
            node=node,
        )
    if isinstance(left, Items) and isinstance(right, Items):
        return Items([*left.items, *right.items], is_list=True)
    return Unknown(text_of(node))

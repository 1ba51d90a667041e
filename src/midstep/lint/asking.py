"""From the test of an `if` to a formula over the questions that matter."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from .conditions import FALSE, TRUE, Ask, Atom, Formula, Topic, both, either, negated
from .evaluator import Evaluator, text_of
from .values import (
    Accelerator,
    Class,
    Condition,
    Const,
    Criterion,
    Function,
    Index,
    Instance,
    Length,
    Module,
    Optimizer,
    Remainder,
    Scaler,
    ScaleRead,
    Schedule,
    Torch,
    Unknown,
    Value,
    key_of,
)

__all__ = ["formula_of", "truth_of"]

IS_FINITE = {"isfinite"}
IS_NOT_FINITE = {"isnan", "isinf"}
# Words of flags whose making is not in sight.
END_OF_PASS = re.compile(r"(^|_|\.)(is_)?last(_|$|\W)|end_of_(epoch|dataloader)|final_batch")
END_OF_WINDOW = re.compile(
    r"sync_grad|should_(sync|step|update)|need_update|do_(step|update|optim)|is_update_step"
    r"|update_(grad|now|params|weights)|step_(now|optim)|is_boundary|at_boundary"
)
INSIDE_WINDOW = re.compile(r"is_accumulat|accumulating|no_update")
STEPPED = re.compile(r"scale_(before|after)|(before|after)_scale|old_scale|prev(ious)?_scale")
SKIPPED = re.compile(r"step_was_skipped|skip(ped)?_(lr_)?(sched|step)|found_inf|overflow")
NUMBERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Objects that are there: `if scaler:` is true.
PRESENT = (
    Scaler,
    Optimizer,
    Schedule,
    Module,
    Accelerator,
    Criterion,
    Instance,
    Function,
    Class,
    Torch,
)


def formula_of(reader: Evaluator, node: ast.expr) -> Formula:
    """Say what a test asks.

    Args:
        reader: Knows the names.
        node: The test.
    """
    if isinstance(node, ast.BoolOp):
        parts = [formula_of(reader, value) for value in node.values]
        return both(parts) if isinstance(node.op, ast.And) else either(parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return negated(formula_of(reader, node.operand))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(reader, node)
    if isinstance(node, ast.Compare):
        return _by_words(text_of(node))
    if isinstance(node, ast.Call) and (found := _called(reader, node)) is not None:
        return found
    return truth_of(reader.evaluate(node), node)


def truth_of(value: Value, node: ast.expr) -> Formula:
    """Say when a value counts as true.

    Args:
        value: What the expression stands for.
        node: The expression.
    """
    if isinstance(value, Condition):
        return value.formula
    if isinstance(value, Const):
        return TRUE if value.value else FALSE
    if isinstance(value, PRESENT):
        return TRUE
    if isinstance(value, Remainder):
        return negated(_window(value, 0))
    words = value.key if isinstance(value, Unknown) else text_of(node)
    return _by_words(words)


def _by_words(words: str) -> Formula:
    if END_OF_PASS.search(words):
        return Ask(Atom(Topic.TAIL, words))
    if END_OF_WINDOW.search(words):
        return Ask(Atom(Topic.WINDOW, words))
    if INSIDE_WINDOW.search(words):
        return negated(Ask(Atom(Topic.WINDOW, words)))
    if SKIPPED.search(words):
        return negated(Ask(Atom(Topic.STEPPED, words)))
    if STEPPED.search(words):
        return Ask(Atom(Topic.STEPPED, words))
    return Ask(Atom(Topic.OTHER, words))


def _called(reader: Evaluator, node: ast.Call) -> Formula | None:
    """`torch.isfinite(x)`, `x.isnan().any()`, `bool(x)`, `all(... for ...)`."""
    name = _last_name(node.func)
    if name in {"bool", "all", "any", "item"} and not node.keywords:
        inner = _inner_of(node)
        if inner is not None:
            return formula_of(reader, inner)
    if name in IS_FINITE | IS_NOT_FINITE:
        subject = node.args[0] if node.args else getattr(node.func, "value", node.func)
        reader.evaluate(subject)
        asked = Ask(Atom(Topic.FINITE, text_of(subject)))
        return asked if name in IS_FINITE else negated(asked)
    return None


def _inner_of(node: ast.Call) -> ast.expr | None:
    if isinstance(node.func, ast.Attribute) and not node.args:
        inner = node.func.value
        return inner if isinstance(inner, ast.Call) else None
    if isinstance(node.func, ast.Attribute) and _last_name(node.func.value) != "torch":
        return None
    if len(node.args) != 1:
        return None
    inner = node.args[0]
    if isinstance(inner, ast.GeneratorExp | ast.ListComp):
        inner = inner.elt
        while _last_name(inner) == "item" and isinstance(inner, ast.Call):
            assert isinstance(inner.func, ast.Attribute)
            inner = inner.func.value
        return inner if _asks_finite(inner) else None
    return inner


def _asks_finite(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Call) and _last_name(part.func) in IS_FINITE | IS_NOT_FINITE
        for part in ast.walk(node)
    )


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _compared(reader: Evaluator, node: ast.Compare) -> Formula:
    left_node, op, right_node = node.left, node.ops[0], node.comparators[0]
    left, right = reader.evaluate(left_node), reader.evaluate(right_node)
    if isinstance(op, ast.Is | ast.IsNot):
        found = _identical(left, right, left_node)
        return negated(found) if isinstance(op, ast.IsNot) else found
    if isinstance(left, Const) and isinstance(right, Const):
        return _numbers(op, left, right, node)
    if _reads_scale(left) or _reads_scale(right):
        return _scale_compared(left, op, right, node)
    if text_of(left_node) == text_of(right_node) and isinstance(op, ast.Eq | ast.NotEq):
        asked: Formula = Ask(Atom(Topic.FINITE, text_of(left_node)))  # `x != x`: it is nan
        return asked if isinstance(op, ast.Eq) else negated(asked)
    if (window := _window_compared(left, op, right)) is not None:
        return window
    if (boundary := _boundary(left, op, right)) is not None:
        return boundary
    return _by_words_of_compare(op, left_node, right_node)


def _by_words_of_compare(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Formula:
    words = f"{text_of(left)} == {text_of(right)}"
    if isinstance(op, ast.Eq):
        return _by_words(words)
    if isinstance(op, ast.NotEq):
        return negated(_by_words(words))
    if isinstance(op, ast.Lt | ast.LtE):  # `a < b` is the opposite of `a >= b`
        sign = ">=" if isinstance(op, ast.Lt) else ">"
        return negated(_by_words(f"{text_of(left)} {sign} {text_of(right)}"))
    sign = ">=" if isinstance(op, ast.GtE) else ">" if isinstance(op, ast.Gt) else type(op).__name__
    return _by_words(f"{text_of(left)} {sign} {text_of(right)}")


def _identical(left: Value, right: Value, node: ast.expr) -> Formula:
    if not (isinstance(right, Const) and right.value is None):
        return Ask(Atom(Topic.OTHER, f"{key_of(left)} is {key_of(right)}"))
    if isinstance(left, Const):
        return TRUE if left.value is None else FALSE
    if isinstance(left, PRESENT):
        return FALSE
    # `x is not None` and `x` ask the same of an object.
    return negated(truth_of(left, node))


def _numbers(op: ast.cmpop, left: Const, right: Const, node: ast.Compare) -> Formula:
    compare = NUMBERS.get(type(op))
    try:
        if compare is not None:
            return TRUE if compare(left.value, right.value) else FALSE
    except TypeError:
        pass
    return Ask(Atom(Topic.OTHER, text_of(node)))


def _reads_scale(value: Value) -> bool:
    return isinstance(value, ScaleRead)


def _scale_compared(left: Value, op: ast.cmpop, right: Value, node: ast.Compare) -> Formula:
    """`scaler.get_scale() >= scale` asks whether the step was taken, as do its relatives."""
    asked = Ask(Atom(Topic.STEPPED, "the scale"))
    falls = isinstance(op, ast.Lt | ast.NotEq) if _reads_scale(left) else isinstance(op, ast.Gt)
    del right, node
    return negated(asked) if falls else asked


def _window_compared(left: Value, op: ast.cmpop, right: Value) -> Formula | None:
    if isinstance(right, Remainder):
        left, right = right, left
    if not isinstance(left, Remainder) or not isinstance(op, ast.Eq | ast.NotEq | ast.Gt):
        return None
    remainder = _remainder(right, left.modulus)
    if remainder is None or (isinstance(op, ast.Gt) and remainder != 0):
        return None
    window = _window(left, remainder)
    return window if isinstance(op, ast.Eq) else negated(window)


def _remainder(asked: Value, modulus: Value) -> int | None:
    """The remainder that is asked for: a number, or `k - 1`, which is -1."""
    if isinstance(asked, Const) and type(asked.value) is int:
        if isinstance(modulus, Const) and type(modulus.value) is int:
            return asked.value - modulus.value if asked.value == modulus.value - 1 else asked.value
        return asked.value
    if isinstance(asked, Index) and asked.key == key_of(modulus):
        return asked.offset
    return None


def _window(value: Remainder, remainder: int) -> Formula:
    if isinstance(value.modulus, Const) and value.modulus.value == 1:
        return TRUE if remainder == 0 else FALSE
    counted, modulus = value.index, key_of(value.modulus)
    if isinstance(value.modulus, Length) or modulus.startswith("len("):
        return Ask(Atom(Topic.TAIL, f"{key_of(counted)} % {modulus}"))
    index = counted if isinstance(counted, Index) else Index(key_of(counted), -1, None)
    phase = index.offset - remainder
    return Ask(
        Atom(
            Topic.WINDOW,
            f"({index.key} + {phase}) % {modulus}",
            index=index.key,
            modulus=modulus,
            phase=phase,
            start=index.start,
            survives=index.survives,
            resets=index.resets,
        )
    )


def _boundary(left: Value, op: ast.cmpop, right: Value) -> Formula | None:
    """`i + 1 == len(loader)`, and `count == k` of a counter that is set back."""
    if isinstance(right, Index) and not isinstance(left, Index):
        left, right = right, left
    if not isinstance(left, Index) or not isinstance(op, ast.Eq | ast.NotEq | ast.GtE | ast.Lt):
        return None
    if left.resets:
        words = f"{left.key} == {key_of(right)}"
        window = Ask(
            Atom(
                Topic.WINDOW,
                words,
                index=left.key,
                modulus=key_of(right),
                phase=left.offset,
                start=left.start,
                survives=left.survives,
                resets=True,
            )
        )
        return negated(window) if isinstance(op, ast.NotEq | ast.Lt) else window
    length = isinstance(right, Length) or key_of(right).startswith("len(")
    is_bound = isinstance(right, Unknown | Index | Const) and isinstance(op, ast.Eq | ast.NotEq)
    if left.loop < 0 and not length:
        return None
    if not (length or is_bound) or (isinstance(right, Const) and right.value in {0, 1}):
        return None
    tail = Ask(Atom(Topic.TAIL, f"{left.key} + {left.offset} == {key_of(right)}"))
    return negated(tail) if isinstance(op, ast.NotEq | ast.Lt) else tail

"""When two values are the same thing, or one holds the other."""

from __future__ import annotations

import ast

from .evaluator import text_of
from .known import is_accumulation_name
from .values import (
    Const,
    Instance,
    Module,
    Unknown,
    Value,
    key_of,
)

__all__ = ["ANY", "bare", "covers", "named_length", "same"]

ANY = "[*]"  # ends the words for one of several, whichever


def same(first: Value | None, second: Value | None) -> bool:
    """Whether two values are the same thing, or are written with the same words.

    Args:
        first: One.
        second: The other.
    """
    if first is None or second is None:
        return False
    if first is second:
        return True
    # What was made in sight is itself and nothing else, whatever its name.
    if not isinstance(first, Unknown) and not isinstance(second, Unknown):
        return isinstance(first, Const) and key_of(first) == key_of(second)
    one, other = key_of(first), key_of(second)
    if one.endswith(ANY) or other.endswith(ANY):
        one, other = one.partition("[")[0], other.partition("[")[0]
    return one == other


def bare(value: Value | None) -> Value | None:
    """A model inside its wrappers.

    Args:
        value: A model, or anything else.
    """
    while isinstance(value, Module) and value.inner is not None:
        value = value.inner
    return value


def covers(whole: Value, part: Value) -> bool:
    """Whether a module is another one or holds it, as far as the text shows.

    Args:
        whole: The one that may hold the other.
        part: The other.
    """
    outer, inner = bare(whole), bare(part)
    if same(outer, inner):
        return True
    if isinstance(outer, Module) and any(covers(piece, part) for piece in outer.parts):
        return True
    if isinstance(outer, Instance) and any(
        isinstance(piece, Module) and covers(piece, part) for piece in outer.attributes.values()
    ):
        return True
    return key_of(inner).startswith((f"{key_of(outer)}.", f"{key_of(outer)}["))


def named_length(node: ast.AST) -> bool:
    """Whether the divisor of a division is written with a name for the length of a window.

    Args:
        node: The division.
    """
    divisor: ast.AST | None = None
    if isinstance(node, ast.BinOp):
        divisor = node.right
    elif isinstance(node, ast.Call) and node.args:
        divisor = node.args[0]
    return isinstance(divisor, ast.Name | ast.Attribute) and is_accumulation_name(text_of(divisor))

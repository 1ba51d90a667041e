"""One call, and what reading to the end does to what can be read once."""

from __future__ import annotations

import ast

from .evaluator import Evaluator
from .values import (
    Const,
    Items,
    Params,
    Value,
    thing,
)

__all__ = ["Call", "use_up"]


@thing
class Call:
    """One call: where, with what."""

    reader: Evaluator
    node: ast.Call
    args: list[Value]
    named: dict[str, Value]

    def get(self, position: int, name: str) -> Value | None:
        """An argument by its place or its name."""
        if position < len(self.args):
            return self.args[position]
        return self.named.get(name)

    def flag(self, name: str, default: object = None) -> object:
        """A named argument that is written out."""
        value = self.named.get(name)
        return value.value if isinstance(value, Const) else default


def use_up(value: Value | None) -> None:
    """Mark what can be read only once as read.

    Args:
        value: What is read to its end.
    """
    if isinstance(value, Params) and value.one_shot:
        value.used_up = True
    elif isinstance(value, Items):
        for item in value.items:
            use_up(item)

"""What the parts of the reader know of each other: one reader walks, the parts judge."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Protocol

from .trace import Act
from .values import Function, Instance, Scope, Value

__all__ = ["Evaluator", "text_of"]


class Evaluator(Protocol):
    """What judges a part of the code may ask of the reader."""

    scope: Scope

    def evaluate(self, node: ast.expr) -> Value:
        """Say what an expression stands for, and note what happens in it."""
        ...

    def emit(
        self,
        act: Act,
        node: ast.AST,
        subject: Value | None = None,
        *,
        by: Value | None = None,
        calm: bool = False,
        spent: bool = False,
    ) -> None:
        """Note that something happens."""
        ...

    def enter(
        self,
        function: Function,
        node: ast.AST,
        args: Sequence[Value],
        named: Mapping[str, Value],
        bound_to: Value | None = None,
    ) -> Value:
        """Walk through the body of a function that is called, and say what it returns."""
        ...

    def attribute(self, owner: Value, name: str, node: ast.expr) -> Value:
        """Say what `owner.name` stands for."""
        ...

    def made(self, cls: Value, node: ast.Call, args: Sequence[Value]) -> Instance | None:
        """Make an instance of a class of this file."""
        ...

    def module_of(self, value: Value) -> Value:
        """The same module for the same words."""
        ...

    def num_loops(self) -> int:
        """How many loops are open."""
        ...

    def is_used(self, node: ast.AST) -> bool:
        """Whether anything is done with what an expression gives."""
        ...


def text_of(node: ast.AST) -> str:
    """The words of an expression.

    Args:
        node: An expression.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    return ast.unparse(node)

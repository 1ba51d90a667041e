"""Comprehensions: parameters that are filtered, counts of a window that are summed."""

from __future__ import annotations

import ast

from .evaluator import text_of
from .values import Index, Iterator, Kind, Length, Loss, Params, Unknown, Value, WindowSum

__all__ = ["collected", "counted"]


def collected(
    node: ast.ListComp | ast.GeneratorExp | ast.SetComp, over: Value, element: Value, num_loops: int
) -> Value:
    """Say what a comprehension stands for.

    Args:
        node: The comprehension.
        over: What it goes over.
        element: What it collects.
        num_loops: How many loops are open around it.
    """
    first = node.generators[0]
    tests = [test for generator in node.generators for test in generator.ifs]
    if isinstance(over, Params) and len(node.generators) == 1:
        over.used_up = over.used_up or over.one_shot
        whole = all(text_of(t).endswith((".requires_grad", ".grad is not None")) for t in tests)
        one_shot = isinstance(node, ast.GeneratorExp)
        born = num_loops
        is_whole = over.whole and whole
        return Params(over.modules, one_shot, is_whole, node, born_in=born)
    if isinstance(element, Params):
        return Unknown(text_of(node))
    if isinstance(element, Length) or (isinstance(element, Loss) and element.kind is Kind.SUM):
        return WindowSum(over)
    if isinstance(element, Loss) and not tests:
        return element.with_(kind=Kind.OTHER)
    length = over.length if isinstance(over, Iterator) and not tests else None
    if length is not None or isinstance(first.iter, ast.Call):
        return Iterator(Unknown(text_of(node)), length=length)
    return Unknown(text_of(node))


def counted(name: str, loop: int, start: int | None, *, survives: bool, resets: bool) -> Index:
    """A number that grows with a loop.

    Args:
        name: Its words.
        loop: The number of the loop.
        start: Its value in the first pass.
        survives: It goes on over the passes of the loop.
        resets: It is set back inside the loop.
    """
    return Index(f"{name}#{loop}", loop, start, 0, survives, resets)

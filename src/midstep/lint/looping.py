"""Loops: what they go over, what counts their passes, and what they change."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING

from .call import use_up
from .collecting import counted
from .evaluator import text_of
from .joining import join_names
from .known import is_optimizer_key
from .sameness import ANY
from .surroundings import stored_in
from .trace import Block, Loop, is_idle
from .values import (
    Const,
    Index,
    Items,
    Iterator,
    Optimizer,
    Schedule,
    Unknown,
    Value,
)

if TYPE_CHECKING:
    from .reading import Reader

__all__ = ["for_loop", "while_loop"]

MOST_UNROLLED = 4


def for_loop(reader: Reader, node: ast.For | ast.AsyncFor) -> bool:
    """Walk through a `for` statement; a short list of optimizers is gone through one by one.

    Args:
        reader: Walks.
        node: The statement.
    """
    over = reader.evaluate(node.iter)
    use_up(over)
    if isinstance(over, Items) and len(over.items) <= MOST_UNROLLED and _are_steppers(over):
        for item in over.items:
            reader.bind(node.target, item)
            if reader.walk(node.body):
                break
        return False
    reader.loop_count += 1
    loop = Loop(Block(), node, reader.loop_count, over)
    _enter_loop(reader, node.body, loop.number)
    _bind_index(reader, node.target, over, loop.number)
    return _loop_body(reader, node, loop)


def _are_steppers(over: Items) -> bool:
    return any(
        isinstance(item, Optimizer | Schedule) or (isinstance(item, Items) and _are_steppers(item))
        for item in over.items
    )


def while_loop(reader: Reader, node: ast.While) -> bool:
    """Walk through a `while` statement.

    Args:
        reader: Walks.
        node: The statement.
    """
    reader.evaluate(node.test)
    reader.loop_count += 1
    loop = Loop(Block(), node, reader.loop_count, None, is_endless=True)
    _enter_loop(reader, node.body, loop.number)
    return _loop_body(reader, node, loop)


def _loop_body(reader: Reader, node: ast.For | ast.AsyncFor | ast.While, loop: Loop) -> bool:
    outer, reader.block = reader.block, loop.body
    reader.loops.append(loop)
    before = dict(reader.scope.names)
    reader.walk(node.body)
    reader.loops.pop()
    reader.block = outer
    join_names(reader.scope.names, reader.scope.names, {**before, **reader.scope.names})
    if not is_idle(loop.body):
        reader.block.nodes.append(loop)
    reader.walk(node.orelse)
    return False


def _enter_loop(reader: Reader, body: list[ast.stmt], number: int) -> None:
    """Names that the loop changes are not what they were before it."""
    stored = stored_in(body)
    for name, times in stored.assigned.items():
        value = reader.scope.names.get(name)
        if isinstance(value, Index) and value.loop != number and not value.survives:
            # A counter of a loop around this one is not set back with it.
            reader.scope.names[name] = dataclasses.replace(value, survives=True)
            continue
        if not isinstance(value, Const) or value.value is None:
            continue
        if stored.increased[name] and times == stored.increased[name] + stored.constant[name]:
            start = value.value if type(value.value) is int else None
            resets = stored.constant[name] > 0
            made = counted(name, number, start, survives=False, resets=resets)
            reader.scope.names[name] = made
        else:
            reader.scope.names[name] = Unknown(name)


def _bind_index(reader: Reader, target: ast.expr, over: Value, number: int) -> None:
    if isinstance(over, Iterator) and over.is_enumerated and isinstance(target, ast.Tuple):
        first, second = target.elts[0], target.elts[-1]
        reader.bind(
            first, counted(text_of(first), number, over.start, survives=False, resets=False)
        )
        reader.bind(second, _element(over.over, second))
    elif isinstance(over, Iterator) and over.is_range and isinstance(target, ast.Name):
        if over.stride is not None:
            reader.bind(target, Unknown(target.id))
        else:
            made = counted(target.id, number, over.start, survives=False, resets=False)
            reader.bind(target, made)
    else:
        reader.bind(target, _element(over, target))


def _element(over: Value, target: ast.expr) -> Value:
    if isinstance(over, Items) and over.items and isinstance(over.items[0], Optimizer | Schedule):
        return over.items[0]
    if isinstance(over, Unknown) and isinstance(target, ast.Name) and is_optimizer_key(over.key):
        return Unknown(f"{over.key}{ANY}")
    return Unknown(text_of(target))

"""Calls of Python's own functions: `enumerate`, `range`, `list`, `float` and their kin."""

from __future__ import annotations

import ast
from collections.abc import Callable

from .call import Call, use_up
from .evaluator import text_of
from .gradients import is_squared_gradient
from .trace import Act
from .values import (
    Const,
    Items,
    Iterator,
    Kind,
    Length,
    Loss,
    Params,
    Unknown,
    Value,
    WindowSum,
)

__all__ = ["BUILTINS"]


def _len(call: Call) -> Value:
    value = call.get(0, "")
    if isinstance(value, Items) and value.is_list:
        return Const(len(value.items))
    if isinstance(value, Iterator) and isinstance(value.length, Const):
        return value.length
    return Length(value) if value is not None else Unknown("len()")


def _enumerate(call: Call) -> Value:
    over = call.get(0, "iterable") or Unknown("?")
    start = call.get(1, "start")
    first = 0 if start is None else start.value if isinstance(start, Const) else None
    length = over.length if isinstance(over, Iterator) else Length(over)
    if isinstance(over, Items) and over.is_list:
        length = Const(len(over.items))
    first = first if isinstance(first, int) else None
    return Iterator(over, start=first, is_enumerated=True, length=length)


def _range(call: Call) -> Value:
    if len(call.args) == 1:
        return Iterator(Unknown("range"), is_range=True, length=call.args[0])
    if len(call.args) < 2:
        return Unknown("range()")
    first, last = call.args[0], call.args[1]
    start = first.value if isinstance(first, Const) and isinstance(first.value, int) else None
    length = last if start == 0 else None
    if start is not None and isinstance(last, Const) and isinstance(last.value, int):
        length = Const(last.value - start)
    stride = call.args[2] if len(call.args) > 2 else None
    if stride is not None:
        start, length = None, None
    return Iterator(Unknown("range"), start=start, is_range=True, length=length, stride=stride)


def _list(call: Call) -> Value:
    value = call.get(0, "")
    if isinstance(value, Params):
        made = Params(value.modules, one_shot=False, whole=value.whole, node=call.node)
        made.used_up = value.used_up
        use_up(value)
        return made
    if isinstance(value, Items):
        return Items(value.items, is_list=True)
    return value if value is not None else Items([], is_list=True)


def _filter(call: Call) -> Value:
    value = call.get(1, "")
    if isinstance(value, Params):
        test = text_of(call.node.args[0])
        return Params(
            value.modules,
            one_shot=True,
            whole=value.whole and (test == "None" or test.endswith(".requires_grad")),
            node=call.node,
            born_in=call.reader.num_loops(),
        )
    return Unknown("filter()")


def _sum(call: Call) -> Value:
    """`sum(losses)` and `torch.sum(p.grad ** 2)`."""
    value = call.get(0, "")
    squares = call.node.args[0] if call.node.args else None
    if isinstance(squares, ast.BinOp | ast.Call) and is_squared_gradient(call.reader, squares):
        call.reader.emit(Act.NORM, call.node, value)
    if isinstance(value, WindowSum | Loss):
        return value
    if isinstance(value, Items) and value.items and isinstance(value.items[0], Loss):
        return value.items[0]
    return Unknown(text_of(call.node))


def _first(call: Call) -> Value:
    return call.args[0] if call.args else Unknown("?")


def _zip(call: Call) -> Value:
    over = call.args[0] if call.args else Unknown("?")
    return Iterator(over, length=Length(over))


def _number(call: Call) -> Value:
    """`float(loss)` reads the device."""
    value = call.get(0, "")
    if isinstance(value, Loss):
        # Arithmetic on what is not known may be on plain numbers.
        if value.kind is not Kind.OTHER or "loss" in text_of(call.node):
            call.reader.emit(Act.READ, call.node, value)
        return Unknown("number")
    if isinstance(value, Const) and str(value.value).lower() in {"inf", "infinity", "+inf"}:
        return Const(float("inf"))
    return value if value is not None else Const(0)


BUILTINS: dict[str, Callable[[Call], Value]] = {
    "len": _len,
    "enumerate": _enumerate,
    "range": _range,
    "trange": _range,
    "list": _list,
    "tuple": _list,
    "filter": _filter,
    "sum": _sum,
    "zip": _zip,
    "float": _number,
    "int": _number,
    "iter": _first,
}

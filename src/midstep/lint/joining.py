"""What a name stands for after a branch: what is known on either side."""

from __future__ import annotations

from collections.abc import Mapping

from .conditions import TRUE, Formula, both, negated
from .values import (
    Bound,
    Const,
    Context,
    Items,
    Loss,
    Module,
    Params,
    Scaled,
    Torch,
    Unknown,
    Value,
)

__all__ = ["chosen", "either_context", "join", "join_names"]


def join(first: Value | None, second: Value | None, name: str) -> Value:
    """Say what a name stands for that may be either.

    An object that is only made under a condition counts as made: the loops that use it ask again.

    Args:
        first: On one side; None where it has no meaning.
        second: On the other.
        name: The words.
    """
    if first is second and first is not None:
        return first
    for one, other in ((first, second), (second, first)):
        if one is None or (isinstance(one, Const) and one.value is None):
            return other if other is not None else Unknown(name)
        if isinstance(one, Module) and other is one.inner and other is not None:
            return one
    assert first is not None
    assert second is not None
    return _join_alike(first, second, name)


def _join_alike(first: Value, second: Value, name: str) -> Value:
    if isinstance(first, Const) and isinstance(second, Const):
        return first if first.value == second.value else Unknown(name)
    if isinstance(first, Scaled) and isinstance(second, Loss | Scaled):
        return first
    if isinstance(second, Scaled) and isinstance(first, Loss):
        return second
    if isinstance(first, Loss) and isinstance(second, Loss):
        longer = first if len(first.divisors) >= len(second.divisors) else second
        return longer.with_(
            kind=first.kind if first.kind is second.kind else longer.kind,
            scaled=first.scaled or second.scaled,
            roots=(first, second, *first.roots, *second.roots),
        )
    if isinstance(first, Params) and isinstance(second, Params):
        one_shot = first.one_shot and second.one_shot
        born = max(first.born_in, second.born_in)
        joined = Params(first.modules, one_shot, whole=False, node=first.node, born_in=born)
        joined.used_up = first.used_up and second.used_up
        return joined
    if isinstance(first, Items) and isinstance(second, Items):
        if len(first.items) == len(second.items) and not first.is_list:
            pairs = zip(first.items, second.items, strict=True)
            return Items([join(one, other, name) for one, other in pairs], first.keys)
        return Unknown(name)
    if isinstance(first, Unknown | Const):
        return Unknown(name) if isinstance(second, Const | Unknown) else second
    return first


def join_names(
    names: dict[str, Value], first: Mapping[str, Value], second: Mapping[str, Value]
) -> None:
    """Take over what two branches left behind.

    Args:
        names: Of the scope; changed in place.
        first: The names after one branch.
        second: The names after the other.
    """
    for name in first.keys() | second.keys():
        one, other = first.get(name), second.get(name)
        names[name] = one if one is other and one is not None else join(one, other, name)


def chosen(formula: Formula, first: Value, second: Value, words: str) -> Value:
    """Say what `first if formula else second` stands for.

    Args:
        formula: The test.
        first: If true.
        second: If not.
        words: Of the expression.
    """
    one, other = _as_context(first), _as_context(second)
    if one is not None and one.name == "no_sync" and (other is None or other.name != "no_sync"):
        return Context("no_sync", one.subject, both([formula, one.formula or TRUE]))
    if other is not None and other.name == "no_sync" and (one is None or one.name != "no_sync"):
        return Context("no_sync", other.subject, both([negated(formula), other.formula or TRUE]))
    return join(first, second, words)


def either_context(first: Value, second: Value) -> bool:
    """Whether one of two values keeps the ranks apart: what a `with` enters depends on the test.

    Args:
        first: One.
        second: The other.
    """
    found = (_as_context(first), _as_context(second))
    return any(context is not None and context.name == "no_sync" for context in found)


def _as_context(value: Value) -> Context | None:
    if isinstance(value, Context):
        return value
    if isinstance(value, Bound) and value.name in {"no_sync", "no_backward_sync"}:
        return Context("no_sync", value.owner)
    if isinstance(value, Torch) and value.name.rpartition(".")[2] in {"nullcontext", "suppress"}:
        return Context("null")
    return None

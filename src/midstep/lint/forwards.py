"""Forwards of models that stand in the file: read for the losses they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .call import Call
from .trace import Block
from .values import Function, Instance, Loss, Module, Value

if TYPE_CHECKING:
    from .expressions import Expressions

__all__ = ["crossing"]


def crossing(reader: Expressions, target: Value, call: Call) -> Loss | None:
    """The loss that a forward returns, if it sets the rows of a batch against each other.

    Of other losses only the caller's line is known: what a model counts is its own affair.

    Args:
        reader: Walks.
        target: The model that is called.
        call: The call.
    """
    model = target.bare() if isinstance(target, Module) else target
    if not isinstance(model, Instance):
        return None
    member = model.cls.find("forward")
    if not isinstance(member, Function):
        return None
    outer, reader.block = reader.block, Block()
    result = reader.enter(member, call.node, call.args, call.named, model)
    reader.block = outer
    return result if isinstance(result, Loss) and result.across_rows else None

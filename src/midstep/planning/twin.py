"""A twin of a model and a batch in fake tensors: every shape and dtype, and no memory at all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..batches import cut_rows, join_rows, map_tensors, num_rows
from ..recomputing import recomputed

__all__ = ["Twin", "fake_twin", "real_copy", "real_twin", "with_rows"]


class Twin(NamedTuple):
    """What is traced: the thing itself, or its fake twin.

    Attributes:
        model: A copy in fake tensors, or the model itself.
        batch: In fake tensors, or itself.
        mode: The context everything runs in.
    """

    model: nn.Module
    batch: Any
    mode: contextlib.AbstractContextManager[Any]


def fake_twin(model: nn.Module | Callable[[], nn.Module], batch: Any) -> Twin:
    """Make the twin of a model, or have a function make the model without memory.

    Args:
        model: The model, which is left alone; or a function that makes it.
        batch: In real tensors.

    Raises:
        TypeError: It is neither.
        ValueError: Recompute is applied to the model already.
    """
    # Constants of a loss, such as class weights, are real and may be.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not callable(model):
        raise _no_model(model)
    if isinstance(model, nn.Module):
        if recomputed(model):
            raise ValueError(
                "`plan(...)`: recompute is applied to this model already, so neither its own peak "
                "nor that of another choice can be found. Call `handle.remove()` first, and apply "
                "the choice of the plan afterwards."
            )
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
        twin = copy.deepcopy(model, memo)
        twin.zero_grad()
    else:
        with mode:
            twin = model()
    if not isinstance(twin, nn.Module):
        raise _no_model(twin)
    return Twin(twin, map_tensors(batch, mode.from_tensor), mode)


def real_copy(model: nn.Module, batch: Any) -> Twin:
    """Copy a model that cannot be traced without values.

    Args:
        model: Left alone; its copy takes its memory once more.
        batch: For it.
    """
    twin = copy.deepcopy(model)
    twin.zero_grad()
    return Twin(twin, batch, contextlib.nullcontext())


def real_twin(model: nn.Module, batch: Any) -> Twin:
    """Take a model and a batch as they are.

    Args:
        model: Whose weights a trace leaves alone.
        batch: For it.
    """
    return Twin(model, batch, contextlib.nullcontext())


def with_rows(batch: Any, rows: int) -> Any:
    """Give a batch of so many rows: a piece of this one, or this one several times.

    Args:
        batch: Any nesting of tensors.
        rows: At least 1.

    Raises:
        ValueError: It holds no rows.

    Example:
        >>> import torch
        >>> with_rows({"x": torch.arange(2)}, 5)["x"].tolist()
        [0, 1, 0, 1, 0]
    """
    here = num_rows(batch)
    if not here:
        raise ValueError(
            "`plan(batch=...)`: the batch holds no rows, so there is nothing to trace. Give one "
            "with at least one row."
        )
    if rows > here:
        batch = join_rows([batch] * -(-rows // here))
    return cut_rows(batch, rows)[0]


def _no_model(given: object) -> TypeError:
    return TypeError(
        f"`plan(model={given!r})`: is no `torch.nn.Module` and no function that makes one, so "
        "there is nothing to trace. Pass either."
    )

"""A twin of a model and a batch in fake tensors: every shape and dtype, and no memory at all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from ..batches import cut_rows, num_rows
from ..recomputing import recomputed

__all__ = ["Twin", "fake_twin", "real_twin", "with_rows"]


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
        ValueError: Recompute is applied to the model already.
    """
    # Constants of a loss, such as class weights, are real and may be.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
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
    fake = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, batch)
    return Twin(twin, fake, mode)


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
        ValueError: It is too small and not a plain nesting, so that it cannot be repeated.

    Example:
        >>> import torch
        >>> with_rows({"x": torch.arange(2)}, 5)["x"].tolist()
        [0, 1, 0, 1, 0]
    """
    here = num_rows(batch)
    if rows > here:
        times = -(-rows // here)
        batch = tree_map(lambda x: _repeated(x, here, times), batch)
        if num_rows(batch) < rows:
            raise ValueError(
                f"The batch has {here} rows and is a `{type(batch).__name__}`, which cannot be "
                f"repeated to make {rows}. Give a larger batch, or plain dicts, tuples and tensors."
            )
    return cut_rows(batch, rows)[0]


def _repeated(value: Any, rows: int, times: int) -> Any:
    if not isinstance(value, Tensor) or not value.ndim or len(value) != rows:
        return value
    return value.repeat(times, *([1] * (value.ndim - 1)))

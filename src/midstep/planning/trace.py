"""Tracing: what one window of a model holds at most, and what it computes, for one setting.

The window is run as the updater runs it: autocast around the forward, a seeded backward, gradients
accumulated in `.grad`, one optimizer step. On fake tensors nothing is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..batches import tensors_of
from ..losses import LossSum
from ..precision import FP32, Precision, autocast_of
from ..recomputing import Recompute, recompute
from .live import LiveBytes, saved_bytes
from .peaks import storage_bytes
from .twin import Twin, with_rows

__all__ = ["Held", "Loss", "Trace", "flops_of", "held_by", "run_microbatch", "saved_by", "trace"]

Loss = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What is held between two updates, in bytes, and what a step takes.

    Attributes:
        parameters: Of all parameters.
        buffers: Of all buffers.
        gradients: Of parameters that get one.
        optimizer: State of the optimizer after its first step.
        step: Most bytes the step holds beyond all of these.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What a microbatch of so many rows holds, beyond parameters, buffers and optimizer state.

    Attributes:
        rows: Of the microbatch.
        most: Most bytes: where it is alone in its window with the gradients it makes, else beside
            the gradients that are there already.
    """

    rows: int
    most: int


def held_by(twin: Twin, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Held:
    """Measure what is held between updates, by stepping the optimizer once with zero gradients.

    Args:
        twin: Of the model, in fake tensors: the step changes its weights.
        make_optimizer: Makes the optimizer for it.
    """
    model = twin.model
    with twin.mode:
        optimizer = make_optimizer(model)
        zeros = _zero_gradients(model)
        with LiveBytes([*_tensors(model), *zeros]) as live:
            optimizer.step()  # makes the state
            state = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor)]
            live.restart()
            before = live.held
            optimizer.step()
            step = live.most - before
            live.close()
        model.zero_grad()
    return Held(
        parameters=storage_bytes(model.parameters()),
        buffers=storage_bytes(model.buffers()),
        gradients=storage_bytes(zeros),
        optimizer=storage_bytes(state),
        step=step,
    )


def trace(
    twin: Twin,
    loss: Loss,
    *,
    rows: int,
    precision: Precision,
    every: int = 0,
    is_alone: bool = False,
) -> Trace:
    """Run a microbatch of a window and note what it holds.

    Gradients are cleared, weights stay.

    Args:
        twin: Of model and batch.
        loss: `loss(model, microbatch)`, as an update takes it.
        rows: Of the microbatch.
        precision: Of the forward.
        every: Blocks that are recomputed together; 0 for none.
        is_alone: Whether it is the only one of its window, before which there are no gradients.
    """
    model = twin.model
    with twin.mode, _recomputing(model, every) as handle, _quiet():
        batch = with_rows(twin.batch, rows)
        known = [*_tensors(model), *tensors_of(batch)]
        model.zero_grad()
        if not is_alone:
            known += _zero_gradients(model)
        with LiveBytes(known) as live:
            if handle is not None:
                handle.counts = live
            run_microbatch(model, batch, loss, precision)
        live.close()
        model.zero_grad()
    return Trace(rows, live.most)


def flops_of(twin: Twin, loss: Loss, *, rows: int, every: int = 0) -> int:
    """Count the operations of forward and backward of a microbatch in float32.

    Not in the same run as the bytes: the counter holds tensors of its own while it counts.

    Args:
        twin: Of model and batch.
        loss: Of the update.
        rows: Of the microbatch.
        every: Blocks that are recomputed together; 0 for none.
    """
    model = twin.model
    with twin.mode, _recomputing(model, every), _quiet():
        with FlopCounterMode(display=False) as counter:
            run_microbatch(model, with_rows(twin.batch, rows), loss, FP32())
        model.zero_grad()
    return int(counter.get_total_flops())


def saved_by(twin: Twin, loss: Loss, *, rows: int, precision: Precision, every: int = 0) -> int:
    """Add up what autograd saves in a forward, each storage once.

    Parameters, buffers and the batch are there anyway and do not count.

    Args:
        twin: Of model and batch.
        loss: Of the update.
        rows: Of the microbatch.
        precision: Of the forward.
        every: Blocks that are recomputed together; 0 for none.
    """
    model = twin.model
    with twin.mode, _recomputing(model, every), _quiet():
        batch = with_rows(twin.batch, rows)
        known = [*_tensors(model), *tensors_of(batch)]
        with saved_bytes(known) as saved:
            _forward(model, batch, loss, precision)
    return saved.total


def run_microbatch(model: nn.Module, batch: Any, loss: Loss, precision: Precision) -> None:
    """Run forward and backward of one microbatch as an updater does.

    Args:
        model: To run.
        batch: The microbatch.
        loss: Gives the loss sum, a `LossSum`, or one per term.
        precision: Of the forward.
    """
    sums = _forward(model, batch, loss, precision)
    torch.autograd.backward(sums, [torch.ones_like(x) for x in sums])


def _forward(model: nn.Module, batch: Any, loss: Loss, precision: Precision) -> list[Tensor]:
    autocast = autocast_of(precision, list(model.parameters()))
    with contextlib.nullcontext() if autocast is None else autocast():
        value = loss(model, batch)
    losses = list(value.values()) if isinstance(value, Mapping) else [value]
    sums = [x.sum if isinstance(x, LossSum) else x for x in losses]
    wrong = [x for x in sums if not isinstance(x, Tensor) or x.numel() != 1]
    if wrong:
        what = f"shape {list(wrong[0].shape)}" if isinstance(wrong[0], Tensor) else repr(wrong[0])
        raise ValueError(
            f"`plan(loss=...)`: the loss gave {what}, and a backward begins with one number. "
            'Return the loss sum of the microbatch, as with `reduction="sum"`, a `LossSum`, or one '
            "of these per term."
        )
    found = [x for x in sums if x.requires_grad]
    if not found:
        raise ValueError(
            "`plan(loss=...)`: no loss depends on a parameter that requires a gradient, so there "
            "is no backward to trace. Check what is frozen, and what is detached."
        )
    return found


def _zero_gradients(model: nn.Module) -> list[Tensor]:
    zeros = []
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
            zeros.append(p.grad)
    return zeros


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@contextlib.contextmanager
def _recomputing(model: nn.Module, every: int) -> Iterator[Recompute | None]:
    handle = recompute(model, every=every) if every else None
    try:
        yield handle
    finally:
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of state that a forward changes: told when it is used
        yield

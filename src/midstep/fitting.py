"""Fitting: a window is run in smaller microbatches until it fits.

Only what can be made again is given up: the gradients of the window, its random draws and its
changes of buffers. An error after the step has been taken is the caller's, since to run the window
again would be a second step.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from .autorows import Fit, is_out_of_memory
from .batches import num_rows
from .errors import OutOfMemory
from .feed import Feed
from .passes import LossFunction, Pass
from .ranks import Ranks
from .records import UpdateRecord
from .snapshot import Buffers, RandomState
from .undoing import StepGuard
from .window import Window

__all__ = ["fitted"]

Batch = TypeVar("Batch")


def fitted(
    window: Window[Batch],
    feed: Feed,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None,
    *,
    loss: LossFunction[Batch],
    end: Callable[[Window[Batch], Pass[Batch]], UpdateRecord],
) -> UpdateRecord:
    """Run an elastic window, in halves of its microbatches where the memory does not suffice.

    Args:
        window: Opened, and not begun.
        feed: Which opened it.
        model: Whose buffers a forward may change.
        optimizer: Whose step may be broken off.
        ranks: The other ranks; an error after their gradients were added up is not taken back.
        loss: Gives the loss sum of a microbatch.
        end: Looks, clips and steps.

    Raises:
        OutOfMemory: A single row does not fit, or the step was broken off half-way.
    """
    elastic = window.elastic
    assert elastic is not None
    total, fit = num_rows(elastic.batch), feed.fit
    rows = fit.rows_for(total, elastic.auto)
    before, buffers = RandomState.capture_torch(), Buffers(model)
    has_failed = False
    while True:
        copies = elastic.auto.guards_step
        if copies is None:
            copies = has_failed or not optimizer.state
        guard = StepGuard(optimizer, copies=copies)
        record, failure = None, ""
        try:
            attempt = feed.attempt(window, elastic.cut(rows))
            record = _attempt(Pass(attempt, model, loss), attempt, end, ranks)
        except Exception as error:
            if guard.is_done or not is_out_of_memory(error):
                raise
            if not guard.undo():
                raise _broken_step(error) from error
            failure = str(error).partition("\n")[0] or type(error).__name__
        finally:
            guard.close()
        if record is not None:
            window.end()
            fit.note_good(total, elastic.auto)
            return record
        # Outside the handler: its traceback held the frames, and those the activations.
        has_failed = True
        _give_back(feed, before, buffers)
        rows = _smaller(fit, rows, failure)


def _attempt(
    passed: Pass[Batch],
    window: Window[Batch],
    end: Callable[[Window[Batch], Pass[Batch]], UpdateRecord],
    ranks: Ranks | None,
) -> UpdateRecord:
    with contextlib.nullcontext() if ranks is None else ranks.world.tolerating(is_out_of_memory):
        passed.run()
    try:
        return end(window, passed)
    except Exception as error:
        if ranks is not None and is_out_of_memory(error):
            raise _after_the_sum(error) from error
        raise


def _give_back(feed: Feed, before: RandomState, buffers: Buffers) -> None:
    feed.clear()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    buffers.restore()
    before.restore()


def _smaller(fit: Fit, rows: int, failure: str) -> int:
    if rows == 1:
        raise OutOfMemory(
            f"Not even a microbatch of one row fits: {failure}. Weights, optimizer state and "
            "schedule are as they were. Recompute blocks (`ms.recompute(model)`), lower the "
            "precision, or shard the model; `ms.plan` says what each would take."
        )
    half = fit.shrink(rows)
    warnings.warn(
        f"Out of memory with microbatches of {rows:,} rows ({failure}). The window is run again "
        f"with {half:,}, to the same gradient.",
        UserWarning,
        stacklevel=4,
    )
    return half


def _broken_step(error: Exception) -> OutOfMemory:
    first = str(error).partition("\n")[0]
    return OutOfMemory(
        f"Out of memory in the middle of an optimizer step ({first}): some weights or moments are "
        "changed and others are not, and there is no copy to go back to. Load the last checkpoint; "
        "`ms.AutoRows(guards_step=True)` keeps a copy before each step."
    )


def _after_the_sum(error: Exception) -> OutOfMemory:
    first = str(error).partition("\n")[0]
    return OutOfMemory(
        f"Out of memory after the gradients of all ranks were added up ({first}), where this rank "
        "cannot run the window again without the others. Lower the rows with "
        "`ms.AutoRows(first=...)` to leave more room for the step."
    )

"""Fitting: a window is run in smaller microbatches until it fits.

Only what can be made again is given up: the gradients of the window, its random draws and its
changes of buffers. Where several ranks share a window each runs its own part again while the others
wait; once gradients are added up, all of them run it again or none. From the step on nothing is
given up, since to run the window again would be a second step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from .autorows import Fit, is_out_of_memory
from .errors import NotAgreed, OutOfMemory
from .feed import Feed
from .passes import LossFunction, Pass
from .ranks import Ranks
from .records import UpdateRecord
from .snapshot import Buffers, RandomState
from .undoing import StepGuard, first_line, give_back, insist
from .window import Window

__all__ = ["fitted"]

Batch = TypeVar("Batch")


def fitted(
    window: Window[Batch],
    feed: Feed,
    model: nn.Module,
    ranks: Ranks | None,
    *,
    loss: LossFunction[Batch],
    end: Callable[[Window[Batch], Pass[Batch]], UpdateRecord],
) -> UpdateRecord:
    """Run an elastic window, in halves of its microbatches where the memory does not suffice.

    On several ranks all of them run it again where one runs out of memory after their gradients
    were added up and before the step. That costs one all-reduce of 8 bytes before each collective
    of the window's end, and one before the step.

    Args:
        window: Opened, and not begun.
        feed: Which opened it.
        model: Whose buffers a forward may change.
        ranks: The other ranks.
        loss: Gives the loss sum of a microbatch.
        end: Looks, clips and steps.

    Raises:
        OutOfMemory: A single row does not fit, or the step neither ended nor could be taken back.
    """
    elastic = window.elastic
    assert elastic is not None
    total, fit = elastic.num_rows, feed.fit
    rows = fit.rows_for(total, elastic.auto)
    before, buffers = RandomState.capture_torch(), Buffers(model)
    is_last_try = False
    while True:
        agreed = _nothing if ranks is None else ranks.world.agreed
        guard = StepGuard(copies=elastic.auto.guards_step, before=agreed)
        record, failure = None, ""
        try:
            attempt = feed.attempt(window, elastic.cut(rows), guard.take)
            record = _attempt(Pass(attempt, model, loss), attempt, end, ranks)
        except NotAgreed:
            pass
        except Exception as error:
            if guard.is_begun or not is_out_of_memory(error):
                raise
            failure = first_line(error)
        if record is not None:
            window.end()
            fit.note_good(total, elastic.auto)
            return record
        # Outside the handler: its traceback held the frames, and those the activations.
        feed.clear()
        give_back()
        insist(buffers.restore)
        insist(before.restore)
        if failure and rows <= 1 and not is_last_try:
            is_last_try = True  # what was given back may be enough
        elif failure:
            rows = _smaller(fit, rows, failure)


def _attempt(
    passed: Pass[Batch],
    window: Window[Batch],
    end: Callable[[Window[Batch], Pass[Batch]], UpdateRecord],
    ranks: Ranks | None,
) -> UpdateRecord:
    if ranks is None:
        return end(window, passed.run())
    with ranks.world.agreeing(is_out_of_memory):
        passed.run()
        try:
            return end(window, passed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if ranks.world.is_inside or not ranks.world.is_agreeing:
                raise _too_late(error, ranks.world.is_inside) from error
            # The others wait at their next collective, and learn it there.
            with contextlib.suppress(NotAgreed):
                ranks.world.agree(is_well=False)
            raise


def _nothing() -> None:
    """Ask nobody."""


def _smaller(fit: Fit, rows: int, failure: str) -> int:
    if rows <= 1:
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


def _too_late(error: Exception, is_inside: bool) -> OutOfMemory:
    where = "a collective" if is_inside else "the step of this rank"
    why = "wait in it" if is_inside else "have taken theirs"
    return OutOfMemory(
        f"Out of memory in {where} ({first_line(error)}), while the other ranks {why}, so the "
        "window cannot be run again. Weights and optimizer state of this rank are as before its "
        "step. Load the last checkpoint, and lower the rows with `ms.AutoRows(first=...)` or pass "
        "`fused=True` to the optimizer, to leave more room."
    )

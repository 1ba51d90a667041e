"""Non-finite values: norms and counts that a step should not have come after."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...findings import Finding
from ..events import Asked, Backward, Clear, Clip, Place, Replaced, ScalerStep, Step
from ..history import History, Update
from ..source import body_of, own_division_of
from .making import make

__all__ = ["check_nonfinite"]


def check_nonfinite(history: History) -> Iterator[Finding]:
    """Find steps that were taken on values that are not finite, and where these came from.

    Args:
        history: Of one process.
    """
    for _, backward in history.of_kind(Backward):
        yield from _empty(backward)
    for update in history.all_updates():
        yield from _stepped(history, update)
        yield from _replaced(history, update)
    yield from _kept(history)
    yield from _kept_by_scaler(history)
    yield from _hidden(history)


def _empty(backward: Backward) -> Iterator[Finding]:
    # What no optimizer steps is somebody's experiment.
    for term in backward.terms if backward.params else ():
        by_zero = any(f.is_division and math.isinf(f.value) for f in term.factors)
        if not by_zero and term.count != 0 and term.mask_sum != 0:
            continue
        if not term.is_mean and math.isfinite(term.weight):
            continue
        yield make(
            "MS606",
            own_division_of(backward.place),
            f"A microbatch counted `0` elements; the loss was `{backward.loss:g}`.",
            {"numel": term.numel, "count": 0},
        )


def _stepped(history: History, update: Update) -> Iterator[Finding]:
    if not update.applied or not update.backwards:
        return
    norms = [
        clip.norm
        for _, clip in history.clips_of(update)
        if clip.by == "norm"
        and not math.isfinite(clip.norm)
        and not clip.all_finite
        # A clip by value has no norm, and one that was not read is nan, too.
        and (math.isinf(clip.norm) or _is_bad(history, update))
    ]
    if norms:
        yield make(
            "MS601",
            update.place,
            f"The norm was `{norms[0]:g}`, and the step was taken.",
            {"norm": norms[0]},
        )
    elif _is_bad(history, update):
        loss = update.backwards[-1][1].loss
        yield make(
            "MS601",
            update.place,
            f"Gradients were not finite (the loss was `{loss:g}`), and the step was taken.",
        )


def _is_bad(history: History, update: Update) -> bool:
    """Whether the gradients were seen not to be finite at the step."""
    if isinstance(update.event, Step):
        return update.event.grads_finite is False
    steps = [s for _, s in history.between(update.first, update.last, Step)]
    return any(s.optimizer == update.optimizer and s.grads_finite is False for s in steps)


def _is_good(history: History, update: Update) -> bool:
    """Whether the gradients were seen to be finite at the step."""
    steps = [s for _, s in history.between(update.first, update.last + 1, Step)]
    return any(s.optimizer == update.optimizer and s.grads_finite is True for s in steps)


def _replaced(history: History, update: Update) -> Iterator[Finding]:
    mine = history.optimizers[update.optimizer].params
    start = update.backwards[-1][0] if update.backwards else update.last
    for _, asked in history.between(start, update.last, Asked):
        if asked.params & mine and update.applied and _is_good(history, update):
            yield make(
                "MS604",
                asked.place,
                "Gradients were not finite here, and finite at the step that was taken.",
            )
            return
    for _, event in history.between(update.first, update.last, Replaced):
        if update.applied and event.params & mine:
            yield make(
                "MS604",
                event.place,
                "Gradients that were not finite were replaced, and the step was taken."
                if event.had_some
                else "Whatever is not finite in a gradient is replaced here, before each step.",
            )


def _hidden(history: History) -> Iterator[Finding]:
    """Losses that were left out of a log because they are nan, after they had been stepped."""
    for index, event in history.of_kind(Asked):
        if event.params:
            continue
        steps = history.between(0, index, Step)
        backwards = history.between(0, index, Backward)
        if not steps or not backwards or steps[-1][0] < backwards[-1][0]:
            continue
        loss = backwards[-1][1].loss
        if not math.isfinite(loss):
            yield make(
                "MS603",
                body_of(event.place),
                f"A loss of `{loss:g}` was looked for after its step had been taken.",
            )


def _kept(history: History) -> Iterator[Finding]:
    """Refused gradients that the next backward was added to."""
    for index, clip in history.of_kind(Clip):
        if clip.by != "norm" or math.isfinite(clip.norm) or clip.all_finite or clip.is_look:
            continue
        for event in history.events[index + 1 :]:
            if isinstance(event, Step | Clear) and event.params & clip.params:
                break
            if isinstance(event, Backward) and event.params & clip.params:
                yield make(
                    "MS605",
                    _usual_clear(history, clip) or clip.place,
                    f"The norm was `{clip.norm:g}`, no step was taken, and the next gradient was "
                    "added to what was left.",
                    {"norm": clip.norm},
                )
                break


def _kept_by_scaler(history: History) -> Iterator[Finding]:
    """Gradients of a step that the scaler skipped, which the next backward was added to."""
    for index, attempt in history.of_kind(ScalerStep):
        if attempt.applied or attempt.again:
            continue
        mine = history.optimizers[attempt.optimizer].params
        for event in history.events[index + 1 :]:
            if isinstance(event, Clear) and event.params & mine:
                break
            if isinstance(event, Backward) and event.params & mine:
                yield make(
                    "MS605",
                    attempt.place,
                    "The scaler skipped the step, nothing cleared the gradients, and the next "
                    "ones were added to them.",
                )
                break


def _usual_clear(history: History, clip: Clip) -> Place | None:
    clears = [c.place for _, c in history.of_kind(Clear) if c.params & clip.params]
    return next((place for place in clears if place is not None), None)

"""Precision: the loss scale from the backward to the step, and sums in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...defects import Level
from ...findings import Finding
from ..events import Backward, Cast, Clear, ScalerStep, ScalerUpdate, Step, Unscale
from ..history import History, Update
from .making import close, make

__all__ = ["check_precision"]

LOST = 1e-3  # relative error of a sum in 16 bits that is worth a word
STALLED = 5e-2


def check_precision(history: History) -> Iterator[Finding]:
    """Find scalers that are used out of turn.

    Args:
        history: Of one process.
    """
    yield from _unscaled_again(history)
    yield from _stepped_again(history)
    yield from _updated_early(history)
    for update in history.all_updates():
        yield from _updated_between(history, update)
        yield from _never_unscaled(history, update)
        yield from _sixteen_bits(history, update)


def _unscaled_again(history: History) -> Iterator[Finding]:
    waiting: dict[tuple[int, int], tuple[int, Unscale]] = {}
    for index, event in enumerate(history.events):
        if isinstance(event, ScalerUpdate) and not event.failed:
            waiting = {key: at for key, at in waiting.items() if key[0] != event.scaler}
        if not isinstance(event, Unscale):
            continue
        key = event.scaler, event.optimizer
        if not event.again:
            waiting[key] = index, event
            continue
        start, first = waiting.get(key, (index, event))
        mine = history.optimizers[event.optimizer].params
        cleared = [c for _, c in history.between(start, index, Clear) if c.params & mine]
        steps = [
            step
            for _, step in history.between(start, index, ScalerStep)
            if step.optimizer == event.optimizer
        ]
        if steps:
            yield make("MS303", steps[-1].place, "`update` was not called after it.")
        elif cleared and first.place == event.place:
            yield make(
                "MS303",
                first.place,
                "The window before ended without `update`, and `unscale_` refused to run again.",
            )
        else:
            backwards = len(history.between(start, index, Backward))
            yield make(
                "MS301",
                event.place,
                f"It had been called since the last `update`, with `{backwards}` backwards in "
                "between, and raised.",
                {"num_backwards": backwards},
            )


def _stepped_again(history: History) -> Iterator[Finding]:
    """Steps of a scaler that had stepped since its last update."""
    open_steps: dict[int, ScalerStep] = {}
    for _, event in enumerate(history.events):
        if isinstance(event, ScalerUpdate) and not event.failed:
            open_steps.pop(event.scaler, None)
        elif isinstance(event, ScalerStep):
            if event.again:
                yield make(
                    "MS303", event.place, "`step` was called again without `update`, and raised."
                )
            open_steps.setdefault(event.scaler, event)
    if history.recording.is_complete:
        for event in open_steps.values():
            yield make("MS303", event.place, "`update` was never called after it.")


def _updated_early(history: History) -> Iterator[Finding]:
    """Updates that raised, because nothing had been stepped yet."""
    for index, event in history.of_kind(ScalerUpdate):
        if not event.failed:
            continue
        before = history.between(0, index, Backward)
        if any(b.scaler == event.scaler for _, b in before):
            yield make(
                "MS302",
                event.place,
                "`update` was called after a backward and before any step, and raised.",
            )


def _updated_between(history: History, update: Update) -> Iterator[Finding]:
    """Updates of the scale between a backward and the step that uses its gradients."""
    scaled = [(index, b) for index, b in update.backwards if b.scaler is not None]
    if not scaled or not isinstance(update.event, ScalerStep):
        return
    first, last = scaled[0][0], scaled[-1][0]
    for index, event in history.between(first, update.last, ScalerUpdate):
        if event.scaler != update.event.scaler or event.failed:
            continue
        change = f"`{event.before:g}` to `{event.after:g}`"
        figures = {"scale_before": event.before, "scale_after": event.after}
        if index < last:
            yield make(
                "MS302",
                event.place,
                f"The scale went from {change} between the microbatches of one window.",
                figures,
            )
        elif not _is_unscaled(history, update, last, index):
            yield make(
                "MS304",
                event.place,
                f"The scale went from {change} before optimizer "
                f"`{history.optimizers[update.optimizer].name}` had used the gradients made with "
                f"`{scaled[-1][1].scale:g}`.",
                figures,
            )


def _is_unscaled(history: History, update: Update, first: int, last: int) -> bool:
    return any(
        event.optimizer == update.optimizer for _, event in history.between(first, last, Unscale)
    )


def _never_unscaled(history: History, update: Update) -> Iterator[Finding]:
    if not isinstance(update.event, Step) or not update.backwards:
        return
    index, backward = update.backwards[-1]
    if backward.scaler is None or backward.scale == 1.0:
        return
    ratio = history.ratio_of(update)
    by_hand = math.isnan(ratio) or close(ratio * backward.scale, 1.0)
    if not by_hand and not _is_unscaled(history, update, index, update.last):
        yield make(
            "MS306",
            update.place,
            f"The gradients carried the scale `{backward.scale:g}`.",
            {"scale": backward.scale},
        )


def _sixteen_bits(history: History, update: Update) -> Iterator[Finding]:
    if update.size < 2:
        return
    last = update.backwards[-1][1]
    if not last.dtype or not last.shadow_error > LOST:
        return
    casts = [event for _, event in history.between(0, update.last, Cast)]
    yield make(
        "MS305",
        casts[-1].place if casts else last.place,
        f"The sum of `{update.size}` microbatches in `{last.dtype}` was off by "
        f"`{last.shadow_error:.2g}` of its length from the same sum in float64.",
        {"error": last.shadow_error, "num_microbatches": update.size},
        Level.WARNING if last.shadow_error > STALLED else None,
    )

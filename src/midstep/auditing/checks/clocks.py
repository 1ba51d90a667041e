"""Clocks: ticks of a schedule against the updates they should follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ...findings import Finding
from ..events import Backward, NewSchedule, Place, ScalerStep, Step, Tick
from ..history import History, Update
from .making import close, make

__all__ = ["check_clocks"]

ENDS = ("CosineAnnealingLR", "OneCycleLR")  # past their end these turn back, or raise


def check_clocks(history: History) -> Iterator[Finding]:
    """Compare the ticks of each schedule with the updates of its optimizer.

    Args:
        history: Of one process.
    """
    for _, schedule in history.of_kind(NewSchedule):
        ticks = [(i, t) for i, t in history.of_kind(Tick) if t.schedule == schedule.schedule]
        updates = history.updates.get(-1 if schedule.optimizer is None else schedule.optimizer, [])
        if not ticks or not updates:
            continue
        often = list(_too_often(schedule, ticks, updates))
        found = [
            *(often or _before_optimizer(schedule, ticks, updates)),
            *_on_skipped(history, ticks, updates),
        ]
        yield from found or _other_unit(history, schedule, ticks, updates)


Ticks = list[tuple[int, Tick]]


def _before_optimizer(
    schedule: NewSchedule, ticks: Ticks, updates: list[Update]
) -> Iterator[Finding]:
    index, first = ticks[0]
    if index > updates[0].last or schedule.name == "ReduceLROnPlateau":
        return
    again = [i for i, tick in ticks if tick.place == first.place and i > updates[0].last]
    # A fast-forward to where a run had stopped ticks on a line of its own.
    if again:
        before = sum(i < updates[0].last for i, _ in ticks)
        yield make(
            "MS401",
            first.place,
            f"It ticked `{before}` times before the first step, which so used rate `{before}` and "
            "not rate `0`.",
            {"num_ticks_before": before},
        )


def _on_skipped(history: History, ticks: Ticks, updates: list[Update]) -> Iterator[Finding]:
    skipped = [u for u in updates if isinstance(u.event, ScalerStep) and not u.applied]
    hits = []
    for update in skipped:
        later = [(i, t) for i, t in ticks if i > update.last]
        if not later:
            continue
        between = history.between(update.last, later[0][0], Backward)
        attempts = [u for u in updates if update.last < u.last < later[0][0]]
        if not between and not attempts:
            hits.append(later[0][1])
    if hits and len(ticks) >= 0.5 * len(updates):
        applied = sum(u.applied for u in updates)
        yield make(
            "MS403",
            hits[0].place,
            f"`{len(hits)}` of `{len(skipped)}` skipped steps were followed by a tick: "
            f"`{len(ticks)}` ticks for `{applied}` applied updates.",
            {"num_ticks": len(ticks), "num_applied": applied, "num_skipped": len(skipped)},
        )


def _too_often(schedule: NewSchedule, ticks: Ticks, updates: list[Update]) -> Iterator[Finding]:
    per_update = []
    for before, after in zip([None, *updates], updates, strict=False):
        start = -1 if before is None else before.last
        per_update.append((sum(start < i <= after.last for i, _ in ticks), after.size))
    # What follows an update belongs to it, wherever in the loop the tick stands.
    inner = per_update[1:] or per_update
    total = sum(count for count, _ in inner)
    if not total or total < 1.5 * len(inner):
        return
    most, _ = Counter(count for count, _ in inner).most_common(1)[0]
    if most < 2:
        return
    fits = schedule.horizon >= len(ticks) - 1
    figures = {"num_ticks": len(ticks), "num_updates": len(updates), "horizon": schedule.horizon}
    if all(size >= 2 and abs(count - size) <= 1 for count, size in inner if count or size):
        if not fits:
            yield make(
                "MS402",
                ticks[0][1].place,
                f"`{len(ticks)}` ticks for `{len(updates)}` updates of `{most}` microbatches.",
                figures,
            )
    elif len(set(_places_of(ticks, updates))) >= 2 and not fits:
        yield make(
            "MS404",
            _places_of(ticks, updates)[-1],
            f"`{most}` ticks for each update, from different lines.",
            figures,
        )
    elif len(ticks) > schedule.horizon:
        yield make(
            "MS404",
            ticks[0][1].place,
            f"`{most}` ticks for each update: the schedule of `{schedule.horizon:g}` ticks ended "
            f"after `{schedule.horizon / most:.0f}` of `{len(updates)}` updates.",
            figures,
        )


def _places_of(ticks: Ticks, updates: list[Update]) -> list[Place | None]:
    """The lines that tick between the first update and the second."""
    last = updates[1].last if len(updates) > 1 else math.inf
    return [tick.place for index, tick in ticks if updates[0].last < index < last]


def _other_unit(
    history: History, schedule: NewSchedule, ticks: Ticks, updates: list[Update]
) -> Iterator[Finding]:
    horizon, last = schedule.horizon, max(tick.count for _, tick in ticks)
    figures = {"horizon": horizon, "num_ticks": len(ticks)}
    backwards = sum(u.size for u in updates)
    if schedule.name in ENDS and last > horizon:
        yield make(
            "MS405",
            ticks[-1][1].place,
            f"The schedule is `{horizon:g}` ticks long and ticked `{last}` times.",
            figures,
        )
    elif (
        schedule.name in ENDS
        and history.recording.is_complete
        and horizon >= 2 * len(ticks)
        and close(horizon, backwards, 0.01)
    ):
        yield make(
            "MS405",
            ticks[-1][1].place,
            f"The schedule is `{horizon:g}` ticks long, as many as there were microbatches, and "
            f"ticked `{len(ticks)}` times.",
            figures,
        )
    else:
        yield from _idle(history, ticks, updates)


def _idle(history: History, ticks: Ticks, updates: list[Update]) -> Iterator[Finding]:
    """Updates at rate 0 behind those at a positive rate."""
    number = updates[0].optimizer
    steps = [s for _, s in history.of_kind(Step) if s.optimizer == number and s.lrs]
    rates = [max(step.lrs) for step in steps]
    idle = 0
    while idle < len(rates) and rates[-1 - idle] <= 0:
        idle += 1
    if idle >= max(2, 0.1 * len(rates)) and any(rate > 0 for rate in rates):
        yield make(
            "MS405",
            ticks[-1][1].place,
            f"The last `{idle}` of `{len(rates)}` updates were made at rate `0`.",
            {"num_idle": idle, "num_updates": len(rates)},
        )

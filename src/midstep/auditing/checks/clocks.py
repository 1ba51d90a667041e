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
        often = list(_too_often(history, schedule, ticks, updates))
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
    # `step(0)` at the start of the first epoch sets the first rate.
    is_first_rate = first.count < 1
    if index > updates[0].last or is_first_rate or schedule.name == "ReduceLROnPlateau":
        return
    again = [i for i, tick in ticks if tick.place == first.place and i > updates[0].last]
    before = sum(i < updates[0].last for i, _ in ticks)
    if before > 1 and before >= updates[0].size - 1:
        return  # with every microbatch, which is another matter
    # A fast-forward to where a run had stopped ticks on a line of its own.
    if again:
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


def _too_often(
    history: History, schedule: NewSchedule, ticks: Ticks, updates: list[Update]
) -> Iterator[Finding]:
    if ticks[-1][1].count - ticks[0][1].count < len(ticks) - 1:
        return  # it is told where it is, as in `step(epoch + batch / batches)`
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
    rates = _rates(history, updates)
    idle = _num_idle(rates)
    # A schedule of one's own that comes down with the last update is made for these ticks.
    comes_down = not idle and bool(rates) and rates[-1] <= 0.25 * max(rates)
    fits = schedule.horizon >= len(ticks) - 1 or (schedule.name == "LambdaLR" and comes_down)
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
    elif len(ticks) > schedule.horizon or idle:
        ended = len(updates) - idle if idle else schedule.horizon / most
        yield make(
            "MS404",
            ticks[0][1].place,
            f"`{most}` ticks for each update: the schedule ended after `{ended:.0f}` of "
            f"`{len(updates)}` updates.",
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
    rates = _rates(history, updates)
    idle = _num_idle(rates)
    if idle:
        yield make(
            "MS405",
            ticks[-1][1].place,
            f"The last `{idle}` of `{len(rates)}` updates were made at rate `0`.",
            {"num_idle": idle, "num_updates": len(rates)},
        )


def _rates(history: History, updates: list[Update]) -> list[float]:
    """The largest rate of each step of an optimizer."""
    number = updates[0].optimizer
    return [max(s.lrs) for _, s in history.of_kind(Step) if s.optimizer == number and s.lrs]


def _num_idle(rates: list[float]) -> int:
    """Updates at rate 0 behind those at a positive rate; 0 where they are few."""
    idle = 0
    while idle < len(rates) and rates[-1 - idle] <= 0:
        idle += 1
    return idle if idle >= max(2, 0.1 * len(rates)) and any(rate > 0 for rate in rates) else 0

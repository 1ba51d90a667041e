"""State and cost: parameters nobody steps, checkpoints that forget, and time that is lost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from ...findings import Finding
from ..events import (
    Backward,
    HostRead,
    Loaded,
    NewSchedule,
    Orphan,
    Place,
    Recompute,
    Saved,
    ScalerStep,
    ScalerUpdate,
    Step,
    Tick,
)
from ..history import History, Update
from ..source import total_of
from .making import make

__all__ = ["check_cost", "check_state"]

MIN_UPDATES = 3  # before a parameter without a gradient is spoken of
GROWING = 4  # passes in a row with more graphs alive than the one before
MIN_KEPT = 3


def check_state(history: History) -> Iterator[Finding]:
    """Find parameters without gradient or optimizer, and what a resume forgot.

    Args:
        history: Of one process.
    """
    yield from _parameters(history)
    yield from _listed_twice(history)
    for _, attempt in history.of_kind(ScalerStep):
        if attempt.is_empty:
            name = history.optimizers[attempt.optimizer].name
            yield make(
                "MS702",
                attempt.place,
                f"No parameter of this `{name}` had a gradient, and the scaler's `step` raised.",
            )
    for _, event in history.of_kind(Recompute):
        if event.drew:
            yield make(
                "MS705", event.place, "The block drew random numbers, and will draw others again."
            )
    yield from _forgotten(history)


def _parameters(history: History) -> Iterator[Finding]:
    orphans = _without_optimizer(history)
    for number, updates in history.updates.items():
        applied = [u for u in updates if u.applied]
        if len(applied) < MIN_UPDATES:
            continue
        optimizer = history.optimizers[number]
        touched = frozenset[int]().union(*(b.params for _, b in history.of_kind(Backward)))
        without = optimizer.params - touched - optimizer.frozen
        made = history.index_of(optimizer)
        stale = [
            orphan
            for orphan, _ in orphans.values()
            if orphan.index > made or orphan.shape in {optimizer.shapes.get(k) for k in without}
        ]
        if without and stale:
            yield make(
                "MS703",
                stale[0].made or optimizer.place,
                f"`{len(without)}` parameters of the optimizer never got a gradient; "
                f"`{len(stale)}` that got one were made later, or in their shapes.",
                {"num_stale": len(without), "num_new": len(stale)},
            )
            for orphan in stale:
                del orphans[orphan.key]
        elif without and not optimizer.is_sharded and history.of_kind(Backward):
            yield make(
                "MS702",
                applied[0].place,
                f"`{len(without)}` of `{len(optimizer.params)}` parameters got no gradient in "
                f"`{len(applied)}` updates.",
                {"num_without": len(without), "num_updates": len(applied)},
            )
    used = [b for u in history.all_updates() for _, b in u.backwards]
    yield from _orphans([pair for pair in orphans.values() if pair[1] in used])


def _without_optimizer(history: History) -> dict[int, tuple[Orphan, Backward]]:
    """Parameters that got a gradient and that no optimizer ever held."""
    held = frozenset[int]().union(*(o.params for o in history.optimizers.values()))
    found: dict[int, tuple[Orphan, Backward]] = {}
    sharded = [o.params for o in history.optimizers.values() if o.is_sharded]
    for _, backward in history.of_kind(Backward):
        if any(backward.params & params for params in sharded):
            continue  # its forward ran on whole parameters, which are put together and thrown away
        for orphan in backward.orphans:
            if orphan.key not in held:
                found.setdefault(orphan.key, (orphan, backward))
    return found


def _orphans(found: list[tuple[Orphan, Backward]]) -> Iterator[Finding]:
    places: dict[Place | None, int] = Counter(backward.place for _, backward in found)
    for place, count in places.items():
        yield make(
            "MS701",
            place,
            f"`{count}` parameters got a gradient here, and no optimizer holds them.",
            {"num_parameters": count},
        )


def _listed_twice(history: History) -> Iterator[Finding]:
    for number, optimizer in history.optimizers.items():
        double = optimizer.num_listed - len(optimizer.params)
        if double:
            yield make(
                "MS704",
                optimizer.place,
                f"`{double}` parameters are listed more than once.",
                {"num_double": double},
            )
        shared = [u for u in history.updates[number] if _is_shared(history, u)]
        if len(shared) >= 2 and len(shared) >= 0.5 * len(history.updates[number]):
            yield make(
                "MS704",
                optimizer.place,
                f"`{len(shared)}` of its steps used gradients that another optimizer had stepped "
                "for the same parameters.",
                {"num_shared": len(shared)},
            )


def _is_shared(history: History, update: Update) -> bool:
    """Whether another optimizer stepped some of the same parameters from the same backward."""
    mine = history.optimizers[update.optimizer].params
    others = [o for n, o in history.optimizers.items() if n != update.optimizer]
    shared = [b for b in update.shared if any(b.params & mine & o.params for o in others)]
    return bool(shared) and len(shared) == len(update.backwards)


def _forgotten(history: History) -> Iterator[Finding]:
    """What a resume did not load although the run has it."""
    loads = {event.what: (index, event) for index, event in history.of_kind(Loaded)}
    if "optimizer" not in loads:
        yield from _optimizer_forgotten(history, loads)
        return
    index, load = loads["optimizer"]
    # Frameworks load a fresh state only to move it. After steps, an optimizer that has no state
    # of its own, as plain SGD, is told from a fresh one by the file.
    if load.is_empty and ("file" not in loads or not history.between(0, index, Step)):
        return
    saves = history.between(0, index, Saved)
    file = next((event for _, event in reversed(saves) if event.what == "file"), None)
    place = load.place if file is None else file.place
    has = {
        "schedule": _moved_schedule(history, index),
        "scaler": bool(history.of_kind(ScalerUpdate)),
    }
    for what, is_used in has.items():
        if is_used and what not in loads:
            yield make(
                "MS706",
                place,
                f"An optimizer was loaded, and the {what} that is used with it was not.",
            )
    if "random state" not in loads:
        yield make("MS707", place, "An optimizer was loaded, and no random state.")


def _optimizer_forgotten(
    history: History, loads: dict[str, tuple[int, Loaded]]
) -> Iterator[Finding]:
    """A schedule or a scaler that was read from a file, beside an optimizer that begins anew."""
    for what in ("schedule", "scaler"):
        index, load = loads.get(what, (-1, None))
        if load is None or "file" not in loads or loads["file"][0] > index:
            continue
        steps = [step for _, step in history.between(index, len(history.events), Step)]
        names = {history.optimizers[step.optimizer].name for step in steps}
        # Whether SGD has a momentum is not known.
        if names and "SGD" not in names:
            yield make(
                "MS706",
                load.place,
                f"A {what} was loaded, and the optimizer that is stepped with it was not.",
            )
            return


def _moved_schedule(history: History, index: int) -> bool:
    """Whether a schedule is used, and starts anew after the load."""
    made = history.of_kind(NewSchedule)
    ticks = history.of_kind(Tick)
    later = [tick for at, tick in ticks if at > index]
    # A schedule that was ticked forward by hand, or given `last_epoch`, is where it should be.
    return bool(made) and (not later or min(tick.count for tick in later) <= 1)


def check_cost(history: History) -> Iterator[Finding]:
    """Find waits and kernels that cost time, and graphs that cost memory.

    Args:
        history: Of one process.
    """
    num_backwards = len(history.of_kind(Backward))
    reads = Counter(event.place for _, event in history.of_kind(HostRead))
    for place, count in reads.items():
        if num_backwards >= 4 and count >= 0.9 * num_backwards:
            yield make(
                "MS801",
                place,
                f"`{count}` reads for `{num_backwards}` microbatches.",
                {"num_reads": count, "num_microbatches": num_backwards},
            )
    stepped = {event.optimizer for _, event in history.of_kind(Step)}
    for number, optimizer in history.optimizers.items():
        if optimizer.takes_fused and number in stepped:
            yield make("MS802", optimizer.place, f"`{optimizer.name}` runs without `fused=True`.")
    yield from _check_graphs(history)


def _check_graphs(history: History) -> Iterator[Finding]:
    """A loop that names several losses keeps as many graphs in every pass; a total, ever more."""
    kept: dict[Place | None, list[int]] = {}
    for _, backward in history.of_kind(Backward):
        passes = kept.setdefault(backward.place, [])
        passes.append(backward.num_kept)
        before = passes[-GROWING:]
        grows = len(before) == GROWING and all(a < b for a, b in itertools.pairwise(before))
        if grows and backward.num_kept >= MIN_KEPT:
            yield make(
                "MS803",
                total_of(backward.place),
                f"The graphs of `{backward.num_kept}` losses that were stepped are still alive.",
                {"num_kept": backward.num_kept},
            )
            return

"""Clearing: gradients that were used again, or thrown away before they were used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...findings import Finding
from ..events import Backward, Clear, Clip, Place, Step
from ..history import Discard, History, Update
from ..source import gate_of, is_periodic
from .making import close, make
from .weights import Part, parts_of

__all__ = ["check_clearing"]


def check_clearing(history: History) -> Iterator[Finding]:
    """Find gradients that were stepped twice, or never.

    Args:
        history: Of one process.
    """
    for number, updates in history.updates.items():
        if not updates:
            continue
        yield from _missing(history, updates)
        yield from _before_step(updates)
        inside = list(_inside(history, updates))
        yield from inside
        if not inside:
            yield from _tail(history, number, updates)


def _missing(history: History, updates: Sequence[Update]) -> Iterator[Finding]:
    stale = [u for u in updates if u.stale and u.backwards]
    if not stale or _divides_by_window(history, stale[0]):
        return
    if is_periodic(_usual_clear(history, stale[0])):
        yield make(
            "MS112",
            stale[0].place,
            f"`{len(stale)}` of `{len(updates)}` steps used gradients that had been stepped "
            "before, while these were cleared once a window.",
            {"num_stale": len(stale), "num_updates": len(updates)},
        )
        return
    most = max(len(u.stale) for u in stale)
    yield make(
        "MS109",
        stale[0].place,
        f"`{len(stale)}` of `{len(updates)}` steps used gradients that had been stepped before, up "
        f"to `{most}` microbatches of them.",
        {"num_stale_updates": len(stale), "num_updates": len(updates)},
    )


def _usual_clear(history: History, update: Update) -> Place | None:
    mine = history.optimizers[update.optimizer].params
    places = [clear.place for _, clear in history.of_kind(Clear) if clear.params & mine]
    return places[-1] if places else None


def _divides_by_window(history: History, update: Update) -> bool:
    """Whether the loss is that of a window: then the step comes too often, not the clearing."""
    parts: list[Part] = parts_of(history, update)
    return bool(parts) and update.size == 1 and parts[0].divisor >= 2


def _before_step(updates: Sequence[Update]) -> Iterator[Finding]:
    empty = [
        u
        for u in updates
        if not u.backwards
        and not u.stale
        and u.discarded
        and not (isinstance(u.event, Step) and u.event.made_by_hand)
    ]
    if not empty or len(empty) < 0.5 * len(updates):
        return
    discard = empty[-1].discarded[-1]
    yield make(
        "MS111",
        discard.clear.place or empty[-1].place,
        f"`{len(empty)}` of `{len(updates)}` steps found no gradient: it had been cleared after "
        "the backward.",
        {"num_empty": len(empty), "num_updates": len(updates)},
    )


def _inside(history: History, updates: Sequence[Update]) -> Iterator[Finding]:
    """Microbatches of one loop, of which only the last is left when the step comes."""
    hits: list[tuple[Update, list[Discard]]] = []
    for update in updates:
        if not update.backwards or not update.discarded:
            continue
        used = update.backwards[-1][1]
        if used.inside is not None:
            continue  # an optimizer that evaluates its closure several times clears in between
        lost = [d for d in update.discarded if _same_loop(d.backward, used)]
        if lost and all(_is_finite(history, d) for d in lost):
            hits.append((update, lost))
    if not hits:
        return
    update, lost = hits[0]
    parts = parts_of(history, update)
    says_window = bool(parts) and close(parts[0].divisor, len(lost) + update.size)
    is_regular = (
        len(hits) >= 2 and len({len(d) for _, d in hits}) == 1 and len(hits) >= (len(updates) - 1)
    )
    if says_window or is_regular:
        yield make(
            "MS110",
            lost[-1].clear.place or update.place,
            f"Of `{len(lost) + update.size}` microbatches before a step, the gradients of "
            f"`{len(lost)}` were cleared unused.",
            {"num_lost": len(lost), "num_used": update.size},
        )


def _same_loop(one: Backward, other: Backward) -> bool:
    return one.route == other.route and bool(one.params & other.params)


def _is_finite(history: History, discard: Discard) -> bool:
    """Whether nothing between the backward and the clearing says that it was refused."""
    clips = history.between(discard.start, discard.index, Clip)
    return not clips and discard.backward.loss == discard.backward.loss  # nan is not itself


def _tail(history: History, number: int, updates: Sequence[Update]) -> Iterator[Finding]:
    usual = max((u.size for u in updates), default=0)
    if usual < 2:
        return
    used = next(u.backwards[-1][1] for u in updates if u.size)
    if used.inside is not None:
        return
    mine = history.optimizers[number].params
    lost = [d for d in history.discards if d.params & mine and _same_loop(d.backward, used)]
    left = [b for _, b, params in history.left if params & mine and _same_loop(b, used)]
    is_over = history.recording.is_complete
    if lost or (left and is_over):
        where = "cleared at the start of the next pass" if lost else "left at the end"
        count = len(lost) or len(left)
        yield make(
            "MS105",
            gate_of(updates[-1].place),
            f"The gradients of `{count}` microbatches were {where}, and never stepped.",
            {"num_lost": count, "size": usual},
        )

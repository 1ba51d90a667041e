"""Ranks: what each of them synchronised, and what they counted together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...defects import Level
from ...findings import Finding
from ..events import Collective, Place
from ..history import History, Update
from ..source import division_of, loss_of, own_division_of, suppressing_of
from .making import close, make
from .weights import Part, parts_of

__all__ = ["check_across_ranks", "check_ranks"]

UNEQUAL = 1.02


def check_ranks(history: History) -> Iterator[Finding]:
    """Find backwards that were summed over ranks too often, too late or not at all.

    Args:
        history: Of one process.
    """
    for update in history.all_updates():
        flags = [history.forward_syncs.get(index) for index, _ in update.backwards]
        if not flags or all(flag is None for flag in flags):
            continue
        yield from _forward_outside(update, flags)
        if flags[-1] is False and not _summed_by_hand(history, update):
            missed = sum(flag is False for flag in flags)
            yield make(
                "MS505",
                update.place,
                f"`{missed}` of `{len(flags)}` microbatches, the last one among them, ran without "
                f"summing over the `{history.recording.world_size}` ranks.",
                {"num_unsynced": missed, "num_microbatches": len(flags)},
            )
        elif len(flags) >= 2 and all(flags) and all(b.syncs for _, b in update.backwards):
            yield make(
                "MS504",
                update.backwards[-1][1].place,
                f"`{len(flags)}` reductions for one update; one is enough.",
                {"num_reductions": len(flags)},
            )


def _forward_outside(update: Update, flags: Sequence[bool | None]) -> Iterator[Finding]:
    late = [
        backward
        for (_, backward), flag in zip(update.backwards, flags, strict=True)
        if flag and backward.syncs is False
    ]
    if late:
        yield make(
            "MS503",
            suppressing_of(late[0].place),
            f"`{len(late)}` of `{len(flags)}` backwards of a window stood inside `no_sync` and "
            "were summed over the ranks all the same.",
            {"num_late": len(late), "num_microbatches": len(flags)},
        )


def _summed_by_hand(history: History, update: Update) -> bool:
    first = update.backwards[-1][0]
    return bool(history.between(first, update.last, Collective))


def check_across_ranks(histories: Sequence[History]) -> Iterator[Finding]:
    """Compare the weights of the ranks, window by window.

    Args:
        histories: Of all ranks of one launch, in order of their rank.
    """
    if len(histories) < 2 or not all(h.forward_syncs for h in histories):
        return
    for number in histories[0].updates:
        lists = [h.updates.get(number, []) for h in histories]
        for updates in zip(*lists, strict=False):
            parts = [parts_of(h, u) for h, u in zip(histories, updates, strict=True)]
            for part in zip(*parts, strict=False):
                yield from _together(updates, part)


def _together(updates: Sequence[Update], parts: Sequence[Part]) -> Iterator[Finding]:
    world_size = len(parts)
    counts = [sum(part.counts) for part in parts]
    place: Place | None = updates[0].backwards[-1][1].place
    totals = [part.total for part in parts]
    if not all(count > 0 for count in counts):
        return
    listed = ", ".join(f"{count:g}" for count in counts)
    figures = {"world_size": world_size, "smallest": min(counts), "largest": max(counts)}
    if all(part.has_own_mean for part in parts):
        if max(counts) > UNEQUAL * min(counts) and all(close(t, totals[0]) for t in totals):
            plain = all(t.count == t.numel for part in parts for t in part.terms)
            is_mean = parts[0].terms[0].is_mean
            yield make(
                "MS501",
                loss_of(place) if is_mean else own_division_of(place),
                f"The ranks counted `{listed}` targets, and each weighed `1 / {world_size}`.",
                figures,
                Level.ADVICE if plain and is_mean else None,
            )
        return
    weights = [w / c for part in parts for w, c in zip(part.shares, part.counts, strict=True) if c]
    if all(close(w, weights[0]) for w in weights) and close(sum(totals), 1.0):
        yield make(
            "MS502",
            division_of(place),
            f"The losses of `{world_size}` ranks weigh `1` together, and the wrapper divides by "
            f"`{world_size}` again: the gradient is `{1 / world_size:.4g}` of the right one.",
            {**figures, "total_weight": 1 / world_size},
        )

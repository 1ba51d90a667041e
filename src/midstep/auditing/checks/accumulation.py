"""Accumulation: what each microbatch weighed, and where windows ended."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ...defects import Level
from ...findings import Finding
from ..events import Place
from ..history import History, Update
from ..source import division_of, gate_of, loss_of, remainder_of
from .making import close, make
from .weights import Part, parts_of, same_route

__all__ = ["check_accumulation"]

UNEQUAL = 1.02  # counts that differ by less are not worth a word
Known = Sequence[tuple[Update, list[Part]]]
Row = tuple[Update, int, float, float]

MAX_LISTED = 8  # microbatches listed in the evidence


def check_accumulation(history: History) -> Iterator[Finding]:
    """Compare weights with the law, and window lengths with each other.

    Args:
        history: Of one process.
    """
    for updates in history.updates.values():
        known = [(update, parts_of(history, update)) for update in updates]
        for update, parts in known:
            if update.size >= 2:
                yield from _mean_of_means(update, parts)
                yield from _divided_twice(update, parts)
        yield from _across_rows(known)
        yield from _not_divided(known)
        yield from _lengths(known)
        yield from _batch_statistics(updates)


def place_of(update: Update) -> Place | None:
    """The line of the backward of a window."""
    return update.backwards[-1][1].place


def _mean_of_means(update: Update, parts: Sequence[Part]) -> Iterator[Finding]:
    for part in parts:
        counts = part.counts
        if not part.has_own_mean or not part.has_equal_shares or not max(counts) > 0:
            continue
        if max(counts) < UNEQUAL * min(counts):
            continue
        # A mean over all rows of a microbatch, of which the loader's last one has fewer.
        is_short_batch = not part.terms[0].is_weighted and all(
            term.count == term.numel for term in part.terms
        )
        level = Level.ADVICE if is_short_batch and _only_last_differs(counts) else None
        whole = sum(counts)
        errors = [part.size * c / whole for c in counts if c > 0]
        listed = ", ".join(f"{c:g}" for c in counts[:MAX_LISTED])
        what = "weights" if part.terms[0].is_weighted else "targets"
        yield make(
            "MS101",
            loss_of(place_of(update)),
            f"{part.size} microbatches with `{listed}` {what} weighed the same, `1 / {part.size}` "
            f"each: a target of the shortest counted `{1 / min(errors):.3g}` times, one of the "
            f"longest `{1 / max(errors):.3g}` times what it should.",
            {
                "num_microbatches": part.size,
                "smallest_count": min(counts),
                "largest_count": max(counts),
                "largest_weight_ratio": 1 / min(errors),
                "smallest_weight_ratio": 1 / max(errors),
            },
            level,
        )


def _only_last_differs(counts: Sequence[float]) -> bool:
    return len(set(counts[:-1])) == 1 and counts[-1] < counts[0]


def _divided_twice(update: Update, parts: Sequence[Part]) -> Iterator[Finding]:
    for part in parts[:1]:
        size = part.size
        if not close(part.total * size, 1.0) or not part.divides_by(size):
            continue
        if part.has_own_mean:
            by_hand = close(part.ratio * size, 1.0)
            twice = part.divides_by(size) >= 2 or by_hand
            # `0.5 * loss / 2` is the half of a loss, over a window of two.
            if size == 2 and not by_hand:
                twice = sum(f.is_division for f in part.factors[0]) >= 2
        else:
            twice = part.divides_by(sum(part.counts)) >= 1
        if twice:
            yield make(
                "MS102",
                division_of(place_of(update)),
                f"The {size} microbatches of a window weigh `{part.total:.4g}` together instead of "
                f"1: `{1 / part.total:.4g}` is their number, by which the loss was divided once "
                "too often.",
                {"total_weight": part.total, "num_microbatches": size},
            )


def _across_rows(known: Known) -> Iterator[Finding]:
    windows = [(u, parts[0]) for u, parts in known if u.size >= 2 and parts]
    terms = [term for _, part in windows for term in part.terms]
    if not terms or not all(term.compares_rows for term in terms):
        return
    # That rows and labels agree so by chance: 1 in 256.
    if sum(term.numel * math.log2(term.numel) for term in terms) < 8:
        return
    update, part = windows[0]
    rows = part.terms[0].numel
    yield make(
        "MS114",
        loss_of(place_of(update)),
        f"Each of the `{rows}` rows of a microbatch is set against the other `{rows - 1}`, in a "
        f"window of `{sum(term.numel for term in part.terms)}` rows.",
        {"rows": rows, "num_microbatches": part.size},
    )


def _not_divided(known: Known) -> Iterator[Finding]:
    for update, parts in known:
        if update.size < 2 or not parts:
            continue
        part = parts[0]
        clean = all(
            not any(f.is_division or close(f.value * part.size, 1.0, 1e-5) for f in factors)
            for factors in part.factors
        )
        if part.has_own_mean and clean and part.has_equal_shares and part.ratio == 1.0:
            coefficient = math.prod(f.value for f in part.factors[0])
            if close(part.shares[0], coefficient) or not part.terms[0].is_mean:
                yield make(
                    "MS103",
                    place_of(update),
                    f"A window of `{part.size}` microbatches weighs `{part.total:.4g}` instead of "
                    f"`{part.total / part.size:.4g}`: the gradient is `{part.size}` times that of "
                    "the mean loss.",
                    {"ratio": float(part.size), "num_microbatches": part.size},
                )


def _lengths(known: Known) -> Iterator[Finding]:
    """Windows whose losses are divided by another number than that of their microbatches."""
    updates = [update for update, _ in known if update.size]
    rows = [
        (update, part.size, part.divisor, part.total)
        for update, parts in known
        for part in parts[:1]
        if part.has_equal_shares and not math.isnan(part.divisor)
    ]
    rows = [row for row in rows if close(row[3], row[1] / row[2])]
    if not rows:
        return
    divisor = Counter(row[2] for row in rows).most_common(1)[0][0]
    sizes = [row[1] for row in rows]
    if len(rows) >= 2 and set(sizes) == {1} and len(rows) == len(updates):
        yield from _every_microbatch(rows[1][0], updates, divisor)
    elif _is_inverted(sizes, divisor):
        yield make(
            "MS108",
            gate_of(rows[0][0].place),
            f"Steps were taken after `{', '.join(map(str, sizes[:MAX_LISTED]))}` microbatches, "
            f"while the loss is divided by `{divisor:g}`.",
            {"divisor": divisor},
        )
    else:
        yield from _short_or_long(rows, divisor)


def _is_inverted(sizes: Sequence[int], divisor: float) -> bool:
    """Whether all but one of each `divisor` microbatches are stepped on."""
    if divisor < 3 or len(sizes) < divisor or set(sizes) != {1, 2}:
        return False
    gaps = [index for index, size in enumerate(sizes) if size == 2]
    steps = [after - before for before, after in itertools.pairwise(gaps)]
    return all(step == divisor - 1 for step in steps) and gaps[0] == divisor - 1


def _every_microbatch(
    update: Update, updates: Sequence[Update], divisor: float
) -> Iterator[Finding]:
    stale = sum(bool(other.stale) for other in updates)
    if any(other.discarded for other in updates):
        return
    if not stale and not remainder_of(place_of(update), divisor):
        return
    yield make(
        "MS112",
        update.place,
        f"The loss is divided by `{divisor:g}`, and `{len(updates)}` steps were taken after "
        f"`{len(updates)}` microbatches"
        + (f", `{stale}` of them with gradients that had been stepped before." if stale else "."),
        {"divisor": divisor, "num_updates": len(updates), "num_stale": stale},
    )


def _short_or_long(rows: Sequence[Row], divisor: float) -> Iterator[Finding]:
    full = [row for row in rows if close(row[3], 1.0)]
    first = rows[0]
    is_off = not close(first[3], 1.0) and bool(full) and len(rows) >= 2
    if is_off and abs(first[1] - divisor) != divisor / 2 and _is_first_only(rows):
        yield make(
            "MS107",
            gate_of(first[0].place),
            f"The first window has `{first[1]}` microbatches, the others have `{full[0][1]}`, and "
            f"each loss is divided by `{divisor:g}`.",
            {"first": first[1], "size": full[0][1], "divisor": divisor},
        )
        return
    for update, size, by, total in rows:
        if size < by and (full or size >= 2) and close(by, divisor):
            yield make(
                "MS104",
                division_of(place_of(update)),
                f"A window of `{size}` microbatches was divided by `{by:g}`: its gradient is "
                f"`{total:.4g}` of the right one.",
                {"num_microbatches": size, "divisor": by, "total_weight": total},
            )
        elif size > by and full:
            yield make(
                "MS106",
                gate_of(update.place),
                f"A window of `{size}` microbatches was divided by `{by:g}`, because those that "
                f"were left of the pass before are in it: it weighs `{total:.4g}`.",
                {"num_microbatches": size, "divisor": by, "total_weight": total},
                Level.WARNING,
            )


def _is_first_only(rows: Sequence[Row]) -> bool:
    """Whether the window of another length is the first one, and not a short last one."""
    return close(rows[1][3], 1.0)


def _batch_statistics(updates: Iterable[Update]) -> Iterator[Finding]:
    for update in updates:
        backwards = [b for _, b in update.backwards]
        if len(backwards) < 2 or not same_route(backwards):
            continue
        for place in dict.fromkeys(place for b in backwards for place in b.batch_norms):
            yield make(
                "MS113",
                place,
                f"It took its statistics `{len(backwards)}` times for one update.",
                {"num_microbatches": len(backwards)},
            )

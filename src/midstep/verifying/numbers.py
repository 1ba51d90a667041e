"""Reasons that are numbers: divisors, counts and means that do not fit each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .certificate import Reason, ReasonKind
from .examination import Accumulated, Examination, Held
from .scale import Weights, countable, is_close, named_ratio, shares, solve
from .subject import Cut, Piece, norm

__all__ = ["count_reason", "crossing_terms", "number_reasons"]

_CUT = "uneven"
_SLACK = 8.0  # on the share of rounding in what least squares leaves over


def count_reason(results: dict[str, Accumulated]) -> Reason | None:
    """Find a loss that says it is a sum over another number than was counted.

    Args:
        results: What each cut that ran added up to.
    """
    for found in results.values():
        for piece in found.pieces:
            for term, carried in piece.carried.items():
                counted = piece.counts[term]
                if math.isclose(carried, counted, rel_tol=1e-6):
                    continue
                rows = "row" if len(piece.rows) == 1 else "rows"
                return Reason(
                    kind=ReasonKind.COUNT,
                    what=f"the loss `{term}` says it is a sum over {carried:g}, and `count` finds "
                    f"{counted:g} in the same {len(piece.rows)} {rows} (from row {piece.rows[0]})",
                    why="Divided by the count, the loss is not the mean that it says it is; "
                    "`Updater` refuses such a window.",
                    remedy="Give `count` the same mask, shift, weights and key as the loss, or "
                    "leave it out: a `LossSum` carries its own.",
                    names=(term,),
                )
    return None


def number_reasons(
    examination: Examination, results: dict[str, Accumulated], held: Held
) -> list[Reason]:
    """Find the terms whose whole is their pieces times numbers, and say what the numbers are.

    Args:
        examination: What was run.
        results: What each cut that ran added up to.
        held: What pieces share with the whole.
    """
    for cut in _cuts(examination, results):
        pieces, weights = _weights(examination, cut, held)
        known = {term: w for term, w in weights.items() if w is not None}
        if len(known) < len(weights):
            continue  # a piece without a gradient, or pieces too much alike: ask another cut
        if not all(_fits(examination, w) for w in known.values()):
            return []
        reasons = [_explained(examination, term, w, pieces, held) for term, w in known.items()]
        return [reason for reason in reasons if reason is not None]
    return []


def crossing_terms(examination: Examination, held: Held) -> tuple[str, ...]:
    """Name the terms whose whole is not their pieces, whatever the numbers; none if there is one.

    Args:
        examination: What was run.
        held: What pieces share with the whole.
    """
    if len(examination.whole.counts) < 2:
        return ()
    cut = next(cut for cut in examination.cuts if cut.name == _CUT)
    _, weights = _weights(examination, cut, held)
    return tuple(term for term, w in weights.items() if w is not None and not _fits(examination, w))


def _cuts(examination: Examination, results: dict[str, Accumulated]) -> list[Cut]:
    """Cuts into few pieces, those of unequal size first: they tell more numbers apart."""
    ran = {cut.name: cut for cut in examination.cuts if cut.name in results}
    return [ran[name] for name in (_CUT, "permuted", "quarters", "halves") if name in ran]


def _weights(
    examination: Examination, cut: Cut, held: Held
) -> tuple[list[Piece], dict[str, Weights | None]]:
    pieces = examination.pieces(cut, held)
    whole = examination.whole
    live = [term for term in whole.counts if norm(whole.gradients[term]) > 0]
    return pieces, {
        term: solve(whole.gradients[term], [piece.gradients[term] for piece in pieces])
        for term in live
    }


def _fits(examination: Examination, weights: Weights) -> bool:
    rounding = math.hypot(*examination.wander) / norm(examination.full)
    return weights.left_over <= _SLACK * rounding * (1 + sum(map(abs, weights.values)))


def _explained(
    examination: Examination, term: str, weights: Weights, pieces: Sequence[Piece], held: Held
) -> Reason | None:
    counts = [piece.counts[term] for piece in pieces]
    whole = examination.whole.counts[term]
    if weights.sums:
        return _count_that_does_not_add_up(term, counts, whole)
    candidates = _candidates(examination, pieces)
    means = [name for name, s in candidates.items() if is_close(weights.values, s)]
    sizes = {len(piece.rows) for piece in pieces}
    is_constant = len(sizes) > 1 and is_close(counts, [counts[0]] * len(counts))
    if is_constant and means:
        return _mean_of_means(term, means[0], counts[0], pieces)
    said = [w * n / whole for w, n in zip(weights.values, counts, strict=True)]
    if is_close(weights.values, shares(counts)) or means:
        over = "its count" if is_close(weights.values, shares(counts)) else means[0]
        return _mean(term, over, _ratio(examination, held))
    if math.isclose(sum(said), 1.0, rel_tol=1e-4):
        over = next((name for name, s in candidates.items() if is_close(said, s)), "something else")
        return _other_count(term, over, said, shares(counts))
    listed = ", ".join(f"{w:.4g}" for w in weights.values)
    return Reason(
        kind=ReasonKind.DIVISOR,
        what=f"the loss `{term}` of the whole is that of its microbatches times {listed}, where a "
        "sum has 1: the accumulated gradient is that of the whole times "
        f"{_ratio(examination, held)}",
        why="The loss divides or multiplies by a number that depends on the microbatch.",
        remedy="Return the plain sum of the loss over its targets.",
        names=(term,),
    )


def _mean_of_means(term: str, over: str, count: float, pieces: Sequence[Piece]) -> Reason:
    sizes = sorted({len(piece.rows) for piece in pieces})
    return Reason(
        kind=ReasonKind.MEAN_OF_MEANS,
        what=f"the loss `{term}` is a mean over {over}, and `count` gives {count:g} for each "
        f"microbatch, be it {sizes[0]} or {sizes[-1]} rows: a mean of means",
        why="A target in a small microbatch weighs more than one in a large one; equal only where "
        "all hold the same number.",
        remedy="Return the sum of the loss (`reduction='sum'`), and count what it is over.",
        names=(term,),
    )


def _mean(term: str, over: str, ratio: str) -> Reason:
    return Reason(
        kind=ReasonKind.DIVISOR,
        what=f"the loss `{term}` is a mean over {over}, not a sum: the accumulated gradient is "
        f"that of the whole times {ratio}",
        why="The window divides once, by the count of all microbatches; a mean is divided already, "
        "by the count of its own.",
        remedy="Return the sum (`reduction='sum'`), or `LossSum.from_mean(loss, count)`.",
        names=(term,),
    )


def _other_count(term: str, over: str, said: Sequence[float], given: Sequence[float]) -> Reason:
    return Reason(
        kind=ReasonKind.COUNT,
        what=f"the loss `{term}` is a mean over {over}, of which the microbatches hold "
        f"{_percent(said)}; by `count` they hold {_percent(given)}",
        why="The mean is multiplied by one count and was divided by another, so some targets weigh "
        "more than others.",
        remedy="Count what the loss is a mean over: the same mask, shift, weights and key.",
        names=(term,),
    )


def _count_that_does_not_add_up(term: str, counts: Sequence[float], whole: float) -> Reason | None:
    total = math.fsum(counts)
    if math.isclose(total, whole, rel_tol=1e-9):
        return None
    known = {"number of microbatches": float(len(counts))}
    return Reason(
        kind=ReasonKind.COUNT,
        what=f"`count` finds {whole:g} for `{term}` in the whole batch and {total:g} in its "
        f"{len(counts)} pieces together: the ratio is {named_ratio(whole / total, known)}",
        why="The loss is a sum and adds up; what it is divided by does not.",
        remedy="Count what is in the microbatch (targets, rows, elements), without a constant, a "
        "floor or a mean.",
        names=(term,),
    )


def _ratio(examination: Examination, held: Held) -> str:
    """Spell accumulated over whole, for pieces of equal size."""
    names = [cut.name for cut in examination.cuts]
    cut = examination.cuts[names.index("quarters" if "quarters" in names else "halves")]
    compared, _ = examination.compare(cut, held)
    num = len(cut.pieces)
    known = {
        "number of microbatches": float(num),
        "rows of the batch": float(examination.subject.num_rows),
        **{f"count of `{term}`": n for term, n in examination.whole.counts.items()},
    }
    words = named_ratio(compared.ratio, known)
    if "=" not in words and 0.5 < compared.ratio / num < 2:
        words += f" (near {num}, the number of microbatches; just that where all count the same)"
    return f"{words}, for the cut `{cut.name}`"


def _candidates(examination: Examination, pieces: Sequence[Piece]) -> dict[str, list[float]]:
    """What the mean might be over, with the share of each piece."""
    found = {"rows": shares([float(len(piece.rows)) for piece in pieces])}
    counted = [countable(examination.subject.batch(piece.rows)) for piece in pieces]
    for name in counted[0]:
        numbers = [each.get(name, 0.0) for each in counted]
        if all(number > 0 for number in numbers):
            found.setdefault(name, shares(numbers))
    # Masks before sizes: an entry that is not masked says more than that there is an entry.
    return dict(sorted(found.items(), key=lambda item: (item[0] != "rows", "are" not in item[0])))


def _percent(parts: Sequence[float]) -> str:
    return ", ".join(f"{part:.1%}" for part in parts)

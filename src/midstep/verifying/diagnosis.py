"""The diagnosis: why pieces do not add up to the whole, one experiment after another.

In order: hold the draws, hold the state, and see whether the equality is back; ask whether the
whole is the pieces times numbers (a divisor, a count); ask each layer whether its rows depend on
each other, and freeze those that do; find the operation at which rows meet.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from .certificate import Comparison, Reason, ReasonKind
from .draws import OtherDraws
from .examination import Accumulated, Examination, Held
from .layers import Crossing, crossing_layers
from .meeting import Meeting, first_meeting
from .numbers import crossing_terms, number_reasons
from .scale import countable
from .subject import Cut, gap, norms

__all__ = ["reasons_of"]


@dataclasses.dataclass(slots=True)
class Findings:
    """What the experiments have shown so far."""

    reasons: list[Reason]
    notes: list[str]


def reasons_of(
    examination: Examination, compared: list[Comparison], results: dict[str, Accumulated]
) -> Findings:
    """Find out why. At least one reason is given, be it that none was found.

    Args:
        examination: What was run.
        compared: Each cut as training would run it.
        results: What each cut that ran added up to.
    """
    findings = Findings([], [])
    failed = [c for c in compared if c.failed]
    for c in failed:
        findings.notes.append(f"The cut `{c.cut}` could not be run: {c.failed}")
    finite = {name: found for name, found in results.items() if found.has_finite_gradient}
    if not examination.repeats:
        findings.reasons.append(_NOT_REPEATABLE)
    elif not all(c.worst <= 1 for c in compared if c.cut in finite):
        _explain(examination, [c for c in compared if c.cut in finite], finite, findings)
    elif not (examination.update_repeats and all(c.equal for c in compared if c.cut in finite)):
        findings.reasons.append(_update(examination, compared))
    elif failed:
        findings.reasons.append(_size(failed))
    broken = next((found for found in results.values() if not found.is_finite), None)
    if broken is not None:
        findings.reasons.append(_not_finite(broken))
    return findings


def _explain(
    examination: Examination,
    compared: list[Comparison],
    results: dict[str, Accumulated],
    findings: Findings,
) -> None:
    """Explain why gradients differ."""
    cuts = [cut for cut in examination.cuts if cut.name in results]
    held = _hold(examination, cuts, compared, findings)
    if held is None:
        return
    findings.reasons += number_reasons(examination, results, held)
    if not findings.reasons and _is_repeated(examination, cuts, held):
        findings.reasons.append(_REPEATED)
    if not findings.reasons:
        _meet(examination, cuts, held, findings)
    if not findings.reasons:
        findings.reasons.append(_UNEXPLAINED)


def _hold(
    examination: Examination, cuts: list[Cut], compared: list[Comparison], findings: Findings
) -> Held | None:
    """Hold draws and state; None when that explains everything, else what to go on with."""
    drew, changed = examination.drew, examination.changed
    ways = [Held(draws=True), Held(state=True), Held(draws=True, state=True)]
    ways = [w for w in ways if (drew or not w.draws) and (changed or not w.state)]
    before = max(c.gap for c in compared if not c.failed)
    can_match = True
    for way in ways:
        if way.draws and not can_match:
            continue
        tried = [examination.compare(cut, way)[0] for cut in cuts]
        words = next((c.failed for c in tried if OtherDraws.__name__ in c.failed), "")
        if words:
            can_match = False
            findings.notes.append(f"The draws could not be matched row by row: {words}")
            continue
        if all(c.equal for c in tried):
            after = max(c.gap for c in tried)
            if way.draws:
                findings.reasons.append(_draws(drew, before, after))
            if way.state:
                findings.reasons.append(_state(changed, before, after))
            return None
    if drew and not can_match:
        findings.reasons.append(_draws(drew, before, None))
        return None
    if drew:
        streams = " and ".join(drew)
        findings.notes.append(f"The forward also draws from {streams}; the draws were matched.")
    return Held(draws=bool(drew), state=bool(changed))


def _meet(examination: Examination, cuts: list[Cut], held: Held, findings: Findings) -> None:
    """Find the layers and the operation at which rows meet."""
    subject, lent = examination.subject, examination.subject.lent

    def run(rows: list[int]) -> object:
        return subject.forward(rows)

    def meeting(sound: set[str]) -> Meeting | None:
        return first_meeting(
            lent.model, run, subject.num_rows, lent.rewind, shares=shares, sound=sound
        )

    shares = _first_half_shares(examination)
    modules = dict(lent.model.named_modules())
    lent.rewind()
    layers, judged = crossing_layers(lent.model, run, subject.num_rows)
    # Where everything is sound by itself, the operations inside get their say after all.
    where = meeting(judged - {layer.name for layer in layers}) or meeting(set())
    if not layers and where is not None and where.module is not None:
        layers = [Crossing(where.module, type(modules[where.module]).__name__, where.moved)]
    if not layers:
        if where is not None:
            findings.reasons.append(_loss(where, crossing_terms(examination, held)))
        return
    with lent.frozen([modules[layer.name] for layer in layers]):
        again = Examination(subject, None)
        is_back = all(again.compare(cut, held)[0].equal for cut in cuts)
        further = None
        if not is_back:
            asked = crossing_layers(lent.model, run, subject.num_rows)
            further = None if asked.crossing else meeting(asked.judged)
    findings.reasons.append(_layers(layers, where, is_back=is_back))
    if further is not None:
        findings.reasons.append(_loss(further, ()))


def _is_repeated(examination: Examination, cuts: list[Cut], held: Held) -> bool:
    """Whether each microbatch adds one gradient on top, the same whatever its rows are.

    Then a cut into k pieces is off by k - 1 times that gradient, for every k.
    """
    extra: list[Tensor] | None = None
    for cut in sorted(cuts, key=lambda cut: -len(cut.pieces)):
        found = examination.compare(cut, held)[1]
        # A microbatch that counts nothing is left out, and so is what it would add.
        times = -1 if found is None else sum(any(p.counts.values()) for p in found.pieces) - 1
        if found is None or times < 1:
            return False
        difference = gap(found.gradient, examination.full)
        if extra is None:
            extra = [part / times for part in difference]
            continue
        bounds = examination.bounds(found, len(cut.pieces))
        rest = norms(gap(difference, [times * part for part in extra]))
        if not all(r <= 2 * bound for r, bound in zip(rest, bounds, strict=True)):
            return False
    return extra is not None and len(cuts) > 1


def _first_half_shares(examination: Examination) -> list[float]:
    """What the first half of the rows may weigh in a mean: by rows, counts, and what is masked."""
    subject = examination.subject
    first, second = _halves(subject.num_rows)
    shares = [len(first) / subject.num_rows]
    one, two = subject.counts(first), subject.counts(second)
    if one and two:
        shares += [one[t] / (one[t] + two[t]) for t in one if one[t] + two[t]]
    here, there = (countable(subject.batch(rows)) for rows in (first, second))
    shares += [here[name] / (here[name] + there[name]) for name in here.keys() & there.keys()]
    return sorted(set(shares))


def _halves(num: int) -> list[list[int]]:
    return [list(range(num // 2)), list(range(num // 2, num))]


def _not_finite(broken: Accumulated) -> Reason:
    bad = [p for p in broken.pieces if not all(map(math.isfinite, p.losses.values()))]
    piece = bad[0] if bad else broken.pieces[0]
    listed = ", ".join(f"{count:g} for `{term}`" for term, count in piece.counts.items())
    if not bad:
        return Reason(
            kind=ReasonKind.SIZE,
            what="the gradient of a microbatch is not finite, although that of the whole batch is",
            why="Something in the model or the loss needs more rows than a microbatch has: a root "
            "or a division where rows vanish, say.",
            remedy="Cut into larger microbatches, or bound what is divided by.",
        )
    return Reason(
        kind=ReasonKind.COUNT,
        what=f"the loss of a microbatch of {len(piece.rows)} (row {piece.rows[0]}) is not finite, "
        f"and `count` finds {listed} in it",
        why="A mean over no target is 0/0. A microbatch that counts nothing is left out; this one "
        "counts, so its nan goes into the sum.",
        remedy="Count what the loss is a mean over: 0 where every target is masked.",
    )


def _size(failed: list[Comparison]) -> Reason:
    names = tuple(c.cut for c in failed)
    listed = " and ".join(f"`{name}`" for name in names)
    return Reason(
        kind=ReasonKind.SIZE,
        what=f"the cut {listed} could not be run: {failed[0].failed}",
        why="The whole batch ran and pieces of it do not, so there is a smallest microbatch.",
        remedy="Cut into larger microbatches; those that ran add up.",
        names=names,
    )


def _update(examination: Examination, compared: list[Comparison]) -> Reason:
    worst = max(c.update_worst or 0.0 for c in compared)
    shown = (
        f"the weights after the next update are not ({worst:.2g} x the bound)"
        if examination.update_repeats
        else "and the same gradient does not even make the same update twice"
    )
    return Reason(
        kind=ReasonKind.UPDATE,
        what=f"the gradients are equal, {shown}",
        why="What differs is made by the optimizer or the clip rule, not by the cut.",
        remedy="Look for randomness in the step, or a rule with a jump at this gradient.",
    )


_NOT_REPEATABLE = Reason(
    kind=ReasonKind.STATE,
    what="the whole batch gives another gradient when it is run again, with buffers, attributes "
    "and every random stream put back",
    why="Something else changes from one forward to the next: a counter in the loss, a cache, a "
    "clock, an operation that is not deterministic.",
    remedy="Find what the loss or the model keeps outside of the model's buffers and attributes.",
)

_REPEATED = Reason(
    kind=ReasonKind.LOSS,
    what="a part of the loss does not depend on the rows: every microbatch adds its gradient once "
    "more, so a cut into k has it k times",
    why="A penalty on weights, or any term that no row enters, is a sum over microbatches and not "
    "over rows.",
    remedy="Multiply it by the number of rows of the microbatch, where rows are counted, or leave "
    "it to the optimizer (`weight_decay`).",
)

_UNEXPLAINED = Reason(
    kind=ReasonKind.UNEXPLAINED,
    what="no experiment explains the difference: draws and state do not, no number on each piece "
    "does, and no layer or operation was seen at which rows meet",
    why="The figures above stand; the reason is not known.",
    remedy="Look for hooks that change gradients in backward (clipping each microbatch, say); "
    "leave out terms of the loss and parts of the model until the gap is gone.",
)


def _draws(streams: list[str], before: float, after: float | None) -> Reason:
    shown = (
        f"with the same draws for the same rows the gap falls from {before:.1e} to {after:.1e}, "
        "which is equal"
        if after is not None
        else f"the gap is {before:.1e}, and the draws could not be matched to show it without them"
    )
    return Reason(
        kind=ReasonKind.DRAWS,
        what=f"the forward draws from {' and '.join(streams)} (dropout, noise, sampling): {shown}",
        why="Draws come in the order of the forwards, so pieces get other ones than the whole. The "
        "expected gradient is the same, the numbers are not.",
        remedy="Nothing, if the draws are independent from row to row; in evaluation mode the rest "
        "can be checked without them.",
        names=tuple(streams),
    )


def _state(changed: list[str], before: float, after: float) -> Reason:
    return Reason(
        kind=ReasonKind.STATE,
        what=f"each forward changes {_listed(changed)}, which the next one reads: put back before "
        f"each microbatch, the gap falls from {before:.1e} to {after:.1e}, which is equal",
        why="A window of k microbatches moves this state k times where the whole batch moves it "
        "once, and each microbatch is computed from another one.",
        remedy="Move the state once an update, after the step, instead of in forward.",
        names=tuple(changed),
    )


def _layers(layers: list[Crossing], where: Meeting | None, *, is_back: bool) -> Reason:
    listed = ", ".join(
        f"`{layer.name or 'the model itself'}` ({layer.kind}, outputs move by {layer.moved:.0%} "
        "of the largest)"
        for layer in layers[:6]
    )
    more = f" and {len(layers) - 6} more" if len(layers) > 6 else ""
    back = (
        " In evaluation mode these layers no longer do so, and the pieces add up to the whole."
        if is_back
        else ""
    )
    place = f" Rows first meet at {_place(where)}." if where is not None and where.place else ""
    return Reason(
        kind=ReasonKind.LAYERS,
        what=f"a row's output depends on other rows in {listed}{more}: it moved when only other "
        f"rows were replaced.{back}",
        why=f"A microbatch shows such a layer fewer rows than the whole batch does, so it computes "
        f"something else; no divisor mends that.{place}",
        remedy="Use a layer that takes each row by itself (GroupNorm, LayerNorm), freeze its "
        "statistics, or accept that the microbatch is part of the model.",
        names=tuple(layer.name for layer in layers),
    )


def _loss(where: Meeting, terms: tuple[str, ...]) -> Reason:
    which = f" (term {', '.join(f'`{term}`' for term in terms)})" if terms else ""
    return Reason(
        kind=ReasonKind.LOSS,
        what=f"the loss{which} compares rows with each other: they meet at {_place(where)}, and in "
        "no layer of the model before it",
        why="Each microbatch is compared within itself, so its rows see fewer others than in the "
        "whole batch; the sum of such losses is another loss.",
        remedy="Compute this term over the whole window at once (embeddings first, then their "
        "gradient), or accept that the microbatch is part of the loss.",
        names=terms or (where.operation,),
    )


def _place(where: Meeting) -> str:
    if not where.place:
        return f"`{where.operation}`"
    return f"{where.place} (`{where.code}`, operation `{where.operation}`)"


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""The norm over a run: whether it grows, and why it is near zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ..run import Run
from .finding import Finding
from .measures import fifths, finite, percent, short, stepped, times

__all__ = ["growing", "near_zero"]

_NUM_NORMS = 50  # ten a fifth: fewer have no median to speak of
_WARM_UP = 0.1  # the share of a run whose norms are those of the first weights
# Norms of healthy runs wander by a factor of 2 and often rise a little while the rate falls.
# Three-fold, in every fifth larger than in the one before, is a direction. A run that learns may
# leave a plateau that way, so while the loss falls it takes ten-fold.
_GROWTH, _GROWTH_WHILE_LEARNING = 3.0, 10.0
_LEARNS = 0.95  # the loss of the last fifth over that of the first
# Where a gradient is noise around zero, its norm falls with the batch, not to nothing: four orders
# below the first updates is a change of kind. What is exactly zero needs no comparison.
_NEAR_ZERO = 1e-4
_NOTHING = 1e-10
_LOW_LOSS = 1e-2  # of the first loss: it was fitted
_MOST = 0.5
_MASKED = 0.1  # of the usual number of targets


def growing(run: Run) -> Iterator[Finding]:
    """The norm rises through the run.

    Args:
        run: The run.
    """
    updates, norms = stepped(run, "grad_norm")
    first = int(_WARM_UP * len(norms))
    updates, norms = updates[first:], norms[first:]
    if len(norms) < _NUM_NORMS:
        return
    medians = fifths(norms)
    losses = stepped(run, "loss_mean")[1]
    parts = fifths(losses[first:]) if len(losses) - first >= _NUM_NORMS else None
    learns = parts is not None and bool(parts[-1] < _LEARNS * parts[0])
    growth = float(medians[-1] / medians[0]) if medians[0] > 0 else 0.0
    if not np.all(np.diff(medians) > 0) or growth < (_GROWTH_WHILE_LEARNING if learns else _GROWTH):
        return
    seen = (
        f"the median of each fifth of the run, without its first tenth, is larger than the last: "
        f"{', '.join(short(float(m)) for m in medians)}; {times(growth)} the first in the end"
    )
    figures: dict[str, float | str] = {
        "first": float(medians[0]),
        "last": float(medians[-1]),
        "ratio": growth,
    }
    if parts is not None:
        figures |= {"first_loss": float(parts[0]), "last_loss": float(parts[-1])}
        way = "falls" if parts[-1] < parts[0] else "rises"
        seen += f". The loss {way} meanwhile, from {short(parts[0])} to {short(parts[-1])}"
    yield Finding(
        rule="norm-grows",
        title="the norm grows",
        seen=f"{seen}.",
        look="the rate, if the loss rises too; the norms by tensor, for the layer that drives it; "
        "the data, if it changes in the course of the run.",
        figures=figures,
        updates=(int(updates[0]), int(updates[-1])),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Cause:
    name: str
    title: str
    why: str
    look: str


def near_zero(run: Run) -> Iterator[Finding]:
    """The norm is next to nothing at the end, told apart by what else is in the record.

    Args:
        run: The run.
    """
    updates, norms = stepped(run, "grad_norm")
    if len(norms) < 20:
        return
    tenth = max(2, len(norms) // 10)
    first, last = float(np.median(norms[:tenth])), float(np.median(norms[-tenth:]))
    if last > max(_NOTHING, _NEAR_ZERO * first):
        return
    limit = max(_NOTHING, _NEAR_ZERO * first)
    above = np.flatnonzero(norms > limit)
    begin = 0 if len(above) == 0 else min(int(above[-1]) + 1, len(norms) - tenth)
    since = updates[begin:]
    kept = np.isin(run.updates, since)
    cause = _cause_of(run, kept, is_exact=last == 0)
    yield Finding(
        rule=f"norm-near-zero-{cause.name}",
        title=f"the norm is near zero: {cause.title}",
        seen=f"the median norm of the last tenth is {short(last)}, of the first {short(first)}; "
        f"from update {int(since[0]):,} on it hardly ever leaves zero. {cause.why}",
        look=cause.look,
        figures={"first": first, "last": last, "cause": cause.name},
        updates=(int(since[0]), int(since[-1])),
    )


def _cause_of(run: Run, kept: np.ndarray, *, is_exact: bool) -> _Cause:
    """Tell the causes apart, the one with the clearest evidence first."""
    for cause in (_masked(run, kept), _underflow(run, kept), _frozen(run, kept, is_exact=is_exact)):
        if cause is not None:
            return cause
    losses = finite(run.column("loss_mean"))
    late = finite(run.column("loss_mean")[kept])
    if len(losses) and len(late) and 0 < abs(np.median(late)) <= _LOW_LOSS * abs(losses[0]):
        return _Cause(
            "converged",
            "converged",
            f"The loss fell with it, from {short(losses[0])} to {short(float(np.median(late)))}.",
            "the held-out loss; further updates change nothing.",
        )
    return _Cause(
        "unknown",
        "the record does not say why",
        "Neither the loss nor the number of targets nor a loss scale explains it.",
        "the norms by tensor and the share of zeros, which observers record.",
    )


def _masked(run: Run, kept: np.ndarray) -> _Cause | None:
    targets, losses = run.column("targets"), run.column("loss_mean")
    late = finite(targets[kept])
    early = finite(targets[~kept])
    if len(late) and len(early) and np.median(late) <= _MASKED * np.median(early):
        return _Cause(
            "masked",
            "most targets are masked",
            f"Meanwhile the median update has {short(float(np.median(late)))} targets, and "
            f"{short(float(np.median(early)))} before.",
            "the labels of these updates, and what `count` counts.",
        )
    late = finite(losses[kept])
    if len(late) and np.all(late == 0):
        counted = finite(targets[kept])
        also = f" over {short(float(np.median(counted)))} counted entries" if len(counted) else ""
        return _Cause(
            "masked",
            "nothing is left in the loss",
            f"The loss is exactly 0{also}: what was counted does not take part in it.",
            "the mask of the labels, and `count`, which counts what the mask leaves out.",
        )
    return None


def _underflow(run: Run, kept: np.ndarray) -> _Cause | None:
    scales, zeros = finite(run.column("loss_scale")[kept]), finite(run.column("grad_zeros")[kept])
    precision = str(run.about.get("settings", {}).get("precision", ""))
    is_scaled = bool(len(scales)) and float(np.median(scales)) != 1.0
    if not (is_scaled or "FP16" in precision):
        return None
    scale = float(np.median(scales)) if len(scales) else float("nan")
    many = bool(len(zeros)) and float(np.median(zeros)) >= _MOST
    if scale >= 1.0 and not many:
        return None
    also = (
        f", and {percent(float(np.median(zeros)))} of the entries are exactly zero" if many else ""
    )
    return _Cause(
        "underflow",
        "it underflows",
        f"Gradients of fp16 below 6e-8 are zeros; the loss scale is {short(scale)}{also}.",
        "the loss scale, and why it fell; bf16 needs none.",
    )


def _frozen(run: Run, kept: np.ndarray, *, is_exact: bool) -> _Cause | None:
    late = finite(run.column("loss_mean")[kept])
    first = finite(run.column("loss_mean"))
    if not is_exact or len(late) == 0 or abs(np.median(late)) <= _LOW_LOSS * abs(first[0]):
        return None
    return _Cause(
        "frozen",
        "nothing that is trained reaches the loss",
        f"The norm is exactly 0, while the loss stays at {short(float(np.median(late)))}.",
        "`requires_grad`, a `detach` on the way, activations that have died, and whether the "
        "optimizer holds the parameters that the loss depends on.",
    )

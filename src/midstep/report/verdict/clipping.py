"""Clipping: whether the log shows the norm at all, how often it was cut, and what that did."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ..run import Run
from .finding import Finding
from .measures import finite, percent, short, stepped

__all__ = ["clipped_often", "clipping_words", "pinned"]

# A norm is a continuous quantity. That a fifth of its values lie within a thousandth of the largest
# one is no accident of the data: something cut them there. (torch divides by norm + 1e-6, so a cut
# norm is not the threshold to the last bit; a thousandth is far wider than that.)
_PILE = 1e-3
_PILE_SHARE = 0.2
_NUM_NORMS = 20  # fewer say nothing about a pile, or a habit

# Rules that look at each tensor or entry: they fire as soon as one small bias stands out, which
# says nothing about the step.
_PIECEWISE = re.compile(r"(?:Adaptive|ByRms|ByTensor\w+|ByValue)\(")

# Above half, the clipped update is the usual one; above 95 % the few exceptions are chance.
_ALWAYS, _OFTEN, _RARELY = 0.95, 0.5, 0.05


def pinned(run: Run) -> Iterator[Finding]:
    """The norm lies on its threshold: it was logged after clipping, or the gradient is cut before.

    Args:
        run: The run.
    """
    updates, norms = stepped(run, "grad_norm")
    if len(norms) < _NUM_NORMS or (top := norms.max()) == 0:
        return
    limits = finite(run.threshold)
    limit = float(np.median(limits)) if len(limits) else float("nan")
    level = limit if run.is_norm_true else float(top)
    on_it = np.abs(norms - level) <= _PILE * level
    share = float(on_it.mean())
    if np.isnan(level) or share < _PILE_SHARE or share == 1.0 == float(np.ptp(norms) == 0):
        return
    on_threshold = f"{percent(share)} of {len(norms):,} norms are {short(level)} to a thousandth"
    figures: dict[str, float | str] = {"share": share, "level": level, "largest": float(top)}
    span = int(updates[on_it][0]), int(updates[on_it][-1])
    if run.is_norm_true:
        yield Finding(
            rule="norm-on-threshold",
            title=f"the norm really lies on the threshold {short(level)}",
            seen=f"{on_threshold}, although they are norms before clipping, and the largest is "
            f"{short(float(top))}.",
            look="what shortens the gradient before midstep sees it: a hook, a clip of one's own "
            "before the step, a loss that normalises.",
            figures=figures,
            updates=span,
        )
        return
    told = "" if np.isnan(limit) else f" The threshold that was named is {short(limit)}."
    yield Finding(
        rule="norm-after-clipping",
        title=f"the norm is pinned at {short(level)}: it was logged after clipping",
        seen=f"{on_threshold}, and none is larger.{told} How long these gradients were is not in "
        "this log.",
        look="where the norm is logged: log what `clip_grad_norm_` returns, which is the norm "
        "before.",
        figures=figures,
        updates=span,
    )


def clipped_often(run: Run) -> Iterator[Finding]:
    """Half of the updates or more are clipped, so the threshold decides the length of the step.

    Args:
        run: The run.
    """
    share = _share(run)
    if int(run.applied.sum()) < _NUM_NORMS:
        return
    rule = str(run.about.get("settings", {}).get("clip", ""))
    if share is None or share < _OFTEN or _PIECEWISE.search(rule):
        return
    if any(True for _ in pinned(run)):
        return
    how = "at every update" if share == 1 else "nearly always" if share >= _ALWAYS else "often"
    steps = run.coefficient[run.applied & np.isfinite(run.coefficient)]
    _, norms = stepped(run, "grad_norm")
    limits = finite(run.threshold)
    seen = f"{percent(share)} of {int(run.applied.sum()):,} applied updates were clipped"
    figures: dict[str, float | str] = {"share": share}
    if len(limits) and len(norms):
        norm, limit = float(np.median(norms)), float(np.median(limits))
        figures |= {"median_norm": norm, "threshold": limit}
        seen += f": the median norm is {short(norm)}, the threshold {short(limit)}"
    if len(steps):
        figures["mean_coefficient"] = float(steps.mean())
        seen += (
            f". The gradient that was stepped was on average {short(float(steps.mean()))} of the "
            f"true one (smallest {short(float(steps.min()))}). With SGD the rate was as much "
            "lower; Adam divides a constant factor out again and feels only its changes"
        )
    clipped = run.updates[run.applied & (run.clipped == 1)]
    yield Finding(
        rule="clipped-always" if share >= _ALWAYS else "clipped-often",
        title=f"clipped {how}",
        seen=f"{seen}.",
        look="the threshold: a quantile of the norms, such as the 90th percentile"
        + (f", here {short(float(np.quantile(norms, 0.9)))}" if len(norms) else "")
        + ", cuts what stands out and leaves the rest.",
        figures=figures,
        updates=(int(clipped[0]), int(clipped[-1])),
    )


def clipping_words(run: Run) -> str | None:
    """How often, and what it did to the step, in words; None where the log does not tell.

    Args:
        run: The run.
    """
    share = _share(run)
    if share is None:
        return None
    if share == 0:
        return "never"
    word = "always" if share >= _ALWAYS else "often" if share >= _OFTEN else "sometimes"
    word = "rarely" if share < _RARELY else word
    steps = run.coefficient[run.applied & np.isfinite(run.coefficient)]
    words = f"{word}, {percent(share)} of applied updates"
    return f"{words}; mean coefficient {short(float(steps.mean()))}" if len(steps) else words


def _share(run: Run) -> float | None:
    known = run.applied & ~np.isnan(run.clipped)
    return float(run.clipped[known].mean()) if known.any() else None

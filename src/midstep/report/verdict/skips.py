"""Updates that came to nothing, the loss scale, and numbers that are none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..run import Flags, Run
from .finding import Finding
from .measures import finite, longest_streak, percent, short

__all__ = ["nonfinite", "scale_collapse", "skipped_in_a_row"]

_IN_A_ROW = 3  # one bad batch is chance, three in a row are a state of the run
_MANY = 0.1
_NUM_UPDATES = 20
# A loss scale begins too high on purpose (2^16) and is halved until it fits: up to sixteen skips in
# the first updates of an fp16 run are its search, not a fault.
_SEARCH = 16
_HALVINGS = 8  # without a success between: 2^8 of range lost within a moment


def skipped_in_a_row(run: Run) -> Iterator[Finding]:
    """Several updates in a row came to nothing, or a tenth of all.

    Args:
        run: The run.
    """
    skipped = ~run.applied & ~_search(run)
    if any(True for _ in scale_collapse(run)):  # it says so already
        skipped &= np.array([verdict != "skipped_nonfinite" for verdict in run.verdicts])
    start, length = longest_streak(skipped)
    share = float(skipped.mean()) if len(skipped) else 0.0
    if length < _IN_A_ROW and not (share >= _MANY and len(run) >= _NUM_UPDATES):
        return
    kinds = {run.verdicts[row] for row in np.flatnonzero(skipped)}
    reasons = ", ".join(
        f"{run.skipped[kind]:,} {kind.removeprefix('skipped_')}" for kind in sorted(kinds)
    )
    rows = np.flatnonzero(skipped)
    in_a_row = length >= _IN_A_ROW
    where = f", from update {int(run.updates[start]):,} on" if in_a_row else ""
    yield Finding(
        rule="skipped-in-a-row" if in_a_row else "skipped-often",
        title=f"{length:,} updates in a row were skipped" if in_a_row else "many skipped updates",
        seen=f"{int(skipped.sum()):,} of {len(run):,} updates were skipped ({reasons}), up to "
        f"{length:,} in a row{where}.",
        look=_where_to_look(kinds),
        figures={"in_a_row": length, "number": int(skipped.sum()), "share": share},
        updates=(int(run.updates[rows[0]]), int(run.updates[rows[-1]])),
    )


def scale_collapse(run: Run) -> Iterator[Finding]:
    """The loss scale fell to where it protects nothing, or never was above it.

    Args:
        run: The run.
    """
    scales = run.column("loss_scale")
    known = np.isfinite(scales) & (scales > 0)
    if not known.any() or np.all(scales[known] == 1.0):
        return
    rows, values = np.flatnonzero(known), scales[known]
    low = rows[values < 1.0]
    falls = np.flatnonzero(np.diff(values) < 0) + 1
    start, length = longest_streak(np.isin(np.arange(len(values)), falls))
    is_late = bool(length) and rows[start] >= _SEARCH
    if len(low) == 0 and not (length >= _HALVINGS and is_late):
        return
    begin = int(low[0]) if len(low) else int(rows[start])
    overflows = sum(verdict == "skipped_nonfinite" for verdict in run.verdicts)
    top, bottom = float(values.max()), float(values.min())
    if top < 1.0:
        title = f"the loss scale is {short(top)} at most"
    else:
        title = f"the loss scale collapsed to {short(bottom)}"
    yield Finding(
        rule="loss-scale-collapse",
        title=title,
        seen=f"the loss scale is {short(float(values[0]))} at the first update, {short(bottom)} at "
        f"its lowest and {short(float(values[-1]))} at the last; {overflows:,} updates "
        "overflowed. Below 1 it shrinks the gradient, and what is small becomes 0 in fp16.",
        look="the first update that overflows again and again: inf or nan in the loss itself "
        "halves the scale without end. bf16 has the range of fp32 and needs no scale.",
        figures={
            "first": float(values[0]),
            "lowest": bottom,
            "last": float(values[-1]),
            "overflows": overflows,
        },
        updates=(int(run.updates[begin]), int(run.updates[-1])),
    )


def nonfinite(run: Run) -> Iterator[Finding]:
    """An applied update has a loss or a norm that is no number.

    Args:
        run: The run.
    """
    losses, norms = run.column("loss_mean"), run.column("grad_norm")
    bad: dict[str, Flags] = {}
    for name, values in (("loss", losses), ("norm", norms)):
        # In a foreign log nan may only mean that nothing was logged: what comes back is a gap.
        is_bad = np.isinf(values)
        if np.isfinite(values).any():
            last = int(np.flatnonzero(np.isfinite(values))[-1])
            tail = np.arange(len(values)) > last
            is_bad |= tail & np.isnan(values) & (int(tail.sum()) >= _IN_A_ROW)
        bad[name] = is_bad & run.applied
    if not any(flags.any() for flags in bad.values()):
        return
    rows = np.flatnonzero(np.any(list(bad.values()), axis=0))
    words = [
        f"the {name} is inf or nan in {int(flags.sum()):,} applied updates"
        for name, flags in bad.items()
        if flags.any()
    ]
    yield Finding(
        rule="not-finite",
        title=f"no numbers any more from update {int(run.updates[rows[0]]):,} on",
        seen=f"{' and '.join(words)}, first in update {int(run.updates[rows[0]]):,} of "
        f"{len(run):,} ({percent(len(rows) / len(run))}).",
        look="the update before: its rate, norm and batch. From there on the weights are lost: "
        "go on from a checkpoint before it.",
        figures={"first": float(run.updates[rows[0]]), "number": len(rows)},
        updates=(int(run.updates[rows[0]]), int(run.updates[rows[-1]])),
    )


def _search(run: Run) -> Flags:
    """The skips by which a loss scale finds its size at the beginning."""
    scales = run.column("loss_scale")
    is_scaled = len(finite(scales)) > 0 and not np.all(scales[np.isfinite(scales)] == 1.0)
    search = np.zeros(len(run), dtype=bool)
    if is_scaled:
        for row, verdict in enumerate(run.verdicts[:_SEARCH]):
            if verdict != "skipped_nonfinite":
                break
            search[row] = True
    return search


def _where_to_look(kinds: set[str]) -> str:
    places = {
        "skipped_nonfinite": "`num_nonfinite` and the loss of these updates, for data or a rate "
        "that breaks the forward",
        "skipped_empty": "the labels of these updates: none of their targets counts",
        "skipped_spike": "whether the norm has moved for good, so that the limit of a spike is "
        "too low",
    }
    return "; ".join(places.get(kind, kind) for kind in sorted(kinds)) + "."

"""Tables: what is drawn of a whole part of a run at a time, computed from all of its updates.

A share, a mean or a largest value of a part must not be taken from thinned updates, which are the
extreme ones. So these are made here, before anything is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..run import Floats, Run
from .thinning import bucket_edges, means

__all__ = [
    "SMOOTHED",
    "TABLE",
    "cells",
    "ends",
    "mean_of",
    "parts_of",
    "shares",
    "smooth",
    "stages",
]

Table = dict[str, list[Any]]

TABLE = "_smooth"  # after the name of a column, that of its means
SMOOTHED = ("loss_mean", "grad_norm", "coefficient", "targets", "seconds")
_PARTS = 100
_PART = 10  # updates at least
_CELLS = 12_000  # of a heat map, all rows together
_WINDOW = 0.02  # of a run, that one value of a smoothed line is the mean of


def ends(run: Run) -> Table:
    """How the updates ended: one row for each stretch that ended alike.

    Args:
        run: The run.
    """
    verdicts = np.array(run.verdicts)
    starts = np.flatnonzero(np.concatenate(([True], verdicts[1:] != verdicts[:-1])))
    stops = np.append(starts[1:], len(verdicts))
    updates = run.updates
    return {
        "r": [run.name] * len(starts),
        "g": verdicts[starts].tolist(),
        "u0": (updates[starts] - 0.5).tolist(),
        "u1": (updates[stops - 1] + 0.5).tolist(),
    }


def shares(run: Run) -> Table:
    """The share of clipped updates in each part of a run, as a staircase.

    Args:
        run: The run.
    """
    clipped = np.where(run.applied, run.clipped, np.nan)
    return mean_of(run, clipped, key=0, is_stairs=True)


def mean_of(run: Run, values: Floats, *, key: int, is_stairs: bool = False) -> Table:
    """The mean of each part of a run.

    Args:
        run: The run.
        values: One an update.
        key: Tells its line from those of other runs.
        is_stairs: Hold the mean over its part, instead of a point in the middle of it.
    """
    edges, parts = means(values, parts_of(len(values)))
    first, last = run.updates[edges[:-1]], run.updates[edges[1:] - 1]
    if is_stairs:
        updates = np.column_stack((first - 0.5, last + 0.5)).ravel()
        parts = np.repeat(parts, 2)
    else:
        updates = (first + last) / 2
    kept = np.isfinite(parts)
    number = int(kept.sum())
    return {
        "u": updates[kept].tolist(),
        "v": parts[kept].tolist(),
        "g": [run.name] * number,
        "k": [f"{run.name} {key}"] * number,
        "o": [1.0] * number,
        "w": [2.0] * number,
        "d": [0] * number,
    }


def stages(run: Run, names: Sequence[str]) -> Table:
    """Seconds of each stage, mean of each part of a run.

    Args:
        run: The run.
        names: Of the stages, from below.
    """
    table: Table = {"u": [], "v": [], "g": [], "i": []}
    for index, name in enumerate(names):
        values = run.column(f"stage_{name}")
        rows = np.flatnonzero(np.isfinite(values))
        edges, parts = means(values[rows], parts_of(len(rows)))
        middle = rows[(edges[:-1] + edges[1:] - 1) // 2]
        table["u"] += run.updates[middle].tolist()
        table["v"] += parts.tolist()
        table["g"] += [name] * len(parts)
        table["i"] += [index] * len(parts)
    return table


def cells(run: Run, field: str) -> Table:
    """The largest value of each tensor in each part of a run; zeros cannot be drawn.

    Args:
        run: The run.
        field: What was measured of each tensor.
    """
    samples = run.by_name[field]
    number = max(10, min(150, _CELLS // max(1, len(samples))))
    table: Table = {"u0": [], "u1": [], "g": [], "v": []}
    for name, found in samples.items():
        edges = bucket_edges(len(found), number)
        values = np.where(np.isfinite(found.values), found.values, 0.0)
        largest = np.maximum.reduceat(values, edges[:-1])
        first = found.updates[edges[:-1]]
        # Each cell reaches to the next, since between two measurements there is none.
        step = float(np.median(np.diff(found.updates))) if len(found) > 1 else 1.0
        last = np.append(first[1:], found.updates[-1] + step)
        kept = largest > 0
        table["u0"] += first[kept].tolist()
        table["u1"] += last[kept].tolist()
        table["g"] += [name] * int(kept.sum())
        table["v"] += largest[kept].tolist()
    return table


def parts_of(length: int) -> int:
    """Into how many parts so many updates are cut, none of them too short to speak for."""
    return max(1, min(_PARTS, length // _PART))


def smooth(values: Floats, *, log: bool = False) -> Floats:
    """The mean of the values around each, of a fiftieth of the run; of logarithms for a log scale.

    Args:
        values: One an update; nan is left out.
        log: Take the geometric mean.
    """
    known = np.isfinite(values) & ((values > 0) if log else True)
    with np.errstate(divide="ignore", invalid="ignore"):
        plain = np.where(known, np.log(values) if log else values, 0.0)
    half = max(1, int(len(values) * _WINDOW / 2))
    totals = np.concatenate(([0.0], np.cumsum(plain)))
    counts = np.concatenate(([0], np.cumsum(known)))
    rows = np.arange(len(values))
    first, last = np.maximum(rows - half, 0), np.minimum(rows + half + 1, len(values))
    number = counts[last] - counts[first]
    with np.errstate(divide="ignore", invalid="ignore"):
        result = (totals[last] - totals[first]) / np.where(number > 0, number, np.nan)
    return np.exp(result) if log else np.asarray(result, dtype=np.float64)

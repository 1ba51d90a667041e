"""Thinning: fewer updates to draw, and nothing that stands out is lost.

A run of 100,000 updates has more points than a screen has pixels. It is cut into buckets; of each
bucket its first and its last update are kept, and for every quantity the one with the lowest and
the one with the highest value. Every skipped update, and every infinite value, is kept too. A line
through what is kept has the same outline as the line through all of it.

Reference: M4 (Jugel et al. 2014, VLDB 7(10), 797-808), which shows that these four are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..run import Flags, Floats

__all__ = ["bucket_edges", "kept_rows", "means"]

Rows = npt.NDArray[np.intp]


def bucket_edges(length: int, number: int) -> Rows:
    """Where each of at most `number` buckets begins, and where the last one ends.

    Example:
        >>> bucket_edges(10, 3).tolist()
        [0, 3, 7, 10]
    """
    return np.linspace(0, length, min(number, length) + 1).round().astype(np.intp)[: length + 1]


def kept_rows(columns: Sequence[Floats], must: Flags, budget: int) -> Rows:
    """Choose the updates that are drawn.

    Costs one pass over each column.

    Args:
        columns: What is drawn, each as long as the run.
        must: Updates that are kept whatever they hold.
        budget: About how many to keep beside those; all of a run that has no more.

    Returns:
        Their rows, rising.

    Example:
        >>> norm = np.ones(1000)
        >>> norm[500] = 9.0
        >>> rows = kept_rows([norm], np.zeros(1000, bool), 40)
        >>> len(rows) <= 40, 500 in rows, 0 in rows, 999 in rows
        (True, True, True, True)
    """
    length = len(must)
    if length <= budget:
        return np.arange(length)
    kept = must.copy()
    edges = bucket_edges(length, max(1, budget // (2 + 2 * len(columns))))
    width = int(np.diff(edges).max())
    # One row a bucket: equal widths, the shorter ones filled up with their last row.
    index = np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)
    kept[index[:, 0]] = kept[index[:, -1]] = True
    for column in columns:
        kept |= np.isinf(column)
        values = column[index]
        for filled in (np.where(np.isfinite(values), values, np.inf), None):
            if filled is None:
                best = np.where(np.isfinite(values), values, -np.inf).argmax(axis=1)
            else:
                best = filled.argmin(axis=1)
            kept[index[np.arange(len(index)), best]] = True
    return np.flatnonzero(kept)


def means(values: Floats, number: int) -> tuple[Rows, Floats]:
    """The mean of each bucket, nan where it holds nothing; with the edges of the buckets.

    Args:
        values: One an update; nan is left out.
        number: Of buckets, at most.
    """
    edges = bucket_edges(len(values), number)
    known = np.isfinite(values)
    totals = np.add.reduceat(np.where(known, values, 0.0), edges[:-1])
    counts = np.add.reduceat(known.astype(np.float64), edges[:-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        return edges, np.where(counts > 0, totals / counts, np.nan)

"""The picture of a threshold: the norms of a run, and a line that can be moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..pictures import ACCENT, INK, MUTED, WARNING, rows

if TYPE_CHECKING:
    import altair as alt

__all__ = ["picture"]

_MAX_POINTS = 4000
Floats = NDArray[np.float64]


def picture(norms: Sequence[float], threshold: float, *, title: str) -> alt.TopLevelMixin:
    """Draw norms over updates, and the share that any threshold would have clipped.

    In a page the threshold is moved with a slider, and the share is counted over every update.

    Args:
        norms: Before clipping, finite ones; in the order of the updates.
        threshold: Where the line begins.
        title: Above the picture.
    """
    import altair as alt

    finite = [(index + 1, norm) for index, norm in enumerate(norms) if 0 < norm < math.inf]
    exponents = np.log10([norm for _, norm in finite])
    low, high = float(exponents.min()), float(exponents.max())
    slider = alt.binding_range(
        min=low, max=high, step=(high - low) / 500 or 0.01, name="threshold (log10) "
    )
    limit = alt.param(name="limit", value=math.log10(threshold), bind=slider)
    axis = alt.Axis(format="~g")
    norm = alt.Y(
        "norm:Q", title="norm before clipping", scale=alt.Scale(type="log", nice=False), axis=axis
    )
    shown = rows({"update": update, "norm": value} for update, value in _thinned(finite))
    points = alt.Chart(shown).mark_point(filled=True, size=14, opacity=0.6)
    above = alt.condition("datum.norm > pow(10, limit)", alt.value(WARNING), alt.value(MUTED))
    cloud = points.encode(x=alt.X("update:Q", title="update"), y=norm, color=above)
    line = (
        alt.Chart(rows([{}]))
        .transform_calculate(norm="pow(10, limit)")
        .mark_rule(color=INK, strokeDash=[4, 3], strokeWidth=1.5)
        .encode(y="norm:Q")
    )
    left = alt.layer(cloud, line).properties(width=520, height=320)
    right = alt.layer(*_share(exponents), line).properties(width=240, height=320)
    drawn: alt.TopLevelMixin = (
        alt.hconcat(left, right, spacing=28)
        .resolve_scale(y="shared")
        .add_params(limit)
        .properties(title=title)
    )
    return drawn


def _share(exponents: Floats) -> list[alt.Chart]:
    """Draw the share above each norm, and in words that above the line."""
    import altair as alt

    axis = alt.Axis(format="~g")
    shares = [
        {"norm": float(10**e), "share": float(np.mean(exponents > e))}
        for e in np.unique(np.quantile(exponents, np.linspace(0, 1, 400)))
    ]
    curve = alt.Chart(rows(shares))
    share = alt.X("share:Q", title="share clipped", axis=alt.Axis(format="%"))
    side = curve.mark_line(color=ACCENT, strokeWidth=2, interpolate="step-after").encode(
        x=share, y=alt.Y("norm:Q", title=None, scale=alt.Scale(type="log", nice=False), axis=axis)
    )
    words = (
        curve.transform_filter("datum.norm <= pow(10, limit) * 1.0000001")
        .transform_aggregate(share="min(share)")
        .transform_calculate(
            text="format(pow(10, limit), '.3~g') + ' clips ' + format(datum.share, '.1%')"
        )
        .mark_text(align="right", fontSize=13, fontWeight=600, color=INK, x=236, y=12)
        .encode(text="text:N")
    )
    return [side, words]


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Leave points out where there are many, but never the extremes of a stretch."""
    if len(points) <= _MAX_POINTS:
        return points
    length = math.ceil(2 * len(points) / _MAX_POINTS)
    kept = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept

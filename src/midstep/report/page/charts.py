"""Charts: each kind of panel once, in altair's grammar. Data comes under a name, later.

The page and the pictures draw the same charts. `lo` and `hi` are the updates that are shown; the
page sets them when somebody zooms. The tables a chart reads are `lines`, `points`, `bands`, `cells`
and `ticks`; which of them, `panels` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import altair as alt

from ...theme import Theme

__all__ = ["END_NAMES", "finished", "heat_chart", "line_chart", "stack_chart", "strip_chart"]

# altair gives `Any` from most of its methods.
Chart: TypeAlias = Any

END_NAMES = ("applied", "skipped_nonfinite", "skipped_empty", "skipped_spike")


def line_chart(
    unit: str,
    groups: Sequence[str],
    *,
    log: bool = False,
    zero: bool = False,
    format: str = "~g",  # noqa: A002 - altair's own name
    tables: Sequence[str] = ("lines",),
    base: int = 10,
) -> Chart:
    """Lines over the updates, with points and bands where there are any.

    Args:
        unit: Title of the vertical axis.
        groups: What a colour stands for, in their order.
        log: A logarithmic vertical axis.
        zero: The vertical axis begins at 0.
        format: Of its labels.
        tables: Which of `bands`, `lines` and `points` there are.
        base: Of the logarithm.
    """
    scale = alt.Scale(type="log", base=base, nice=False) if log else alt.Scale(zero=zero, nice=True)
    axis = alt.Axis(format=format, tickCount=5)
    if log:  # a line for each labelled tick, not for every digit
        axis = alt.Axis(
            format=format,
            tickCount=4,
            gridOpacity=alt.condition("datum.label", alt.value(1), alt.value(0)),
        )
    y = alt.Y("v:Q", title=unit, scale=scale, axis=axis)
    color = alt.Color("g:N", scale=alt.Scale(domain=list(groups)), legend=None)
    layers: list[alt.Chart] = []
    if "bands" in tables:
        band = alt.Chart(alt.NamedData("bands")).mark_area(clip=True, opacity=0.18)
        layers.append(
            band.encode(
                x=_x(), y=alt.Y("v0:Q", title=unit, scale=scale, axis=axis), y2="v1:Q", color=color
            )
        )
    if "lines" in tables:
        line = alt.Chart(alt.NamedData("lines")).mark_line(clip=True, strokeJoin="round")
        layers.append(
            line.encode(
                x=_x(),
                y=y,
                color=color,
                detail="k:N",
                opacity=alt.Opacity("o:Q", scale=None),
                strokeWidth=alt.StrokeWidth("w:Q", scale=None),
                strokeDash=alt.StrokeDash(
                    "d:N", scale=alt.Scale(domain=[0, 1], range=[[1, 0], [5, 4]]), legend=None
                ),
            )
        )
    if "points" in tables:
        point = alt.Chart(alt.NamedData("points")).mark_line(
            clip=True, strokeWidth=2, point=alt.OverlayMarkDef(size=34, filled=True)
        )
        layers.append(point.encode(x=_x(), y=y, color=color, detail="k:N"))
    return layers[0] if len(layers) == 1 else alt.layer(*layers)


def stack_chart(unit: str, groups: Sequence[str], *, format: str = "~g") -> Chart:  # noqa: A002
    """Areas on top of each other, a step for each part of the run.

    Args:
        unit: Title of the vertical axis.
        groups: The areas, from below.
        format: Of the labels.
    """
    return (
        alt.Chart(alt.NamedData("lines"))
        .mark_area(clip=True, opacity=0.85, line=False)
        .encode(
            x=_x(),
            y=alt.Y("v:Q", title=unit, stack="zero", axis=alt.Axis(format=format, tickCount=5)),
            color=alt.Color("g:N", scale=alt.Scale(domain=list(groups)), legend=None),
            order=alt.Order("i:Q"),
        )
    )


def heat_chart(unit: str, names: Sequence[str], *, format: str = "~e") -> Chart:  # noqa: A002
    """A row for each tensor, a cell for each part of the run, colours on a log scale.

    Args:
        unit: What a colour stands for.
        names: The rows, from above.
        format: Of the legend.
    """
    color = alt.Color(
        "v:Q",
        title=unit,
        scale=alt.Scale(type="log", scheme="viridis", nice=False),
        legend=alt.Legend(
            orient="top", direction="horizontal", gradientLength=160, format=format, tickCount=3
        ),
    )
    return (
        alt.Chart(alt.NamedData("cells"))
        .mark_rect(clip=True)
        .encode(
            x=_x("u0"),
            x2="u1:Q",
            y=alt.Y(
                "g:N",
                sort=None,
                title=None,
                scale=alt.Scale(domain=list(names)),
                axis=alt.Axis(labelLimit=220, labelOverlap=True, labelFontSize=10, grid=False),
            ),
            color=color,
        )
    )


def strip_chart(runs: Sequence[str], theme: Theme) -> Chart:
    """A bar for each run, coloured by how its updates ended.

    Args:
        runs: Their names, from above.
        theme: Whose colours say how an update ended.
    """
    return (
        alt.Chart(alt.NamedData("ticks"))
        .mark_rect(clip=True)
        .encode(
            x=_x("u0"),
            x2="u1:Q",
            y=alt.Y(
                "r:N",
                sort=None,
                title=None,
                scale=alt.Scale(domain=list(runs), paddingInner=0.3),
                axis=alt.Axis(labelLimit=130, grid=False) if len(runs) > 1 else None,
            ),
            color=alt.Color(
                "g:N",
                scale=alt.Scale(domain=list(END_NAMES), range=list(theme.ends)),
                legend=None,
            ),
            # A single update is narrower than a pixel; the edge makes it one.
            strokeWidth=alt.condition("datum.g == 'applied'", alt.value(0), alt.value(1.5)),
            stroke=alt.Stroke(
                "g:N",
                scale=alt.Scale(domain=list(END_NAMES), range=list(theme.ends)),
                legend=None,
            ),
        )
    )


def finished(chart: Chart, *, height: int, lo: float, hi: float) -> dict[str, Any]:
    """Give a chart as a specification, with its place and the updates it shows.

    Args:
        chart: The chart.
        height: In pixels.
        lo: The first update that is shown.
        hi: The last one.
    """
    chart = chart.add_params(alt.param(name="lo", value=lo), alt.param(name="hi", value=hi))
    spec: dict[str, Any] = chart.properties(height=height).to_dict(validate=False)
    spec.pop("config", None)
    return spec


def _x(field: str = "u") -> alt.X:
    return alt.X(
        f"{field}:Q",
        title="update",
        scale=alt.Scale(
            domainMin=alt.ExprRef("lo"), domainMax=alt.ExprRef("hi"), zero=False, nice=False
        ),
        axis=alt.Axis(format=",~d", tickCount=6, tickMinStep=1),
    )

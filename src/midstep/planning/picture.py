"""The picture of the recompute trade-off: measured peak and time over k, beside L/k + k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..arithmetic import show_bytes
from ..pictures import ACCENT, MUTED, WARNING, rows
from .tradeoff import Tradeoff

if TYPE_CHECKING:
    import altair as alt

__all__ = ["picture"]


def picture(found: Sequence[Tradeoff], *, title: str) -> alt.TopLevelMixin:
    """Draw it: bars are measured peaks with their times above, the line is the model.

    Args:
        found: As `measure_tradeoff` gives them: first without recompute.
        title: Above the picture.
    """
    import altair as alt

    plain = found[0]
    values = [
        {
            "k": str(row.every) if row.every else "none",
            "share": row.peak_bytes / plain.peak_bytes,
            "model": row.model_parts / plain.model_parts if row.every else None,
            "time": f"{row.relative_time:.2f}x",
            "way": "measured" if row.every else "measured, without",
            "law": "model, (L/k + k) / L",
        }
        for row in found
    ]
    straight = alt.Axis(labelAngle=0)
    k = alt.X("k:N", title="k, blocks that are run again together", sort=None, axis=straight)
    axis = alt.Axis(format="%")
    share = alt.Y("share:Q", title="peak of forward and backward", axis=axis)
    names = ["measured", "measured, without", "model, (L/k + k) / L"]
    colours = alt.Scale(domain=names, range=[ACCENT, MUTED, WARNING])
    legend = alt.Legend(title=None, orient="top")
    base = alt.Chart(rows(values))
    bars = base.mark_bar(width={"band": 0.7}).encode(
        k, share, alt.Color("way:N", scale=colours, legend=legend)
    )
    times = base.mark_text(dy=-7).encode(k, share, text="time:N")
    law = (
        alt.Chart(rows(value for value in values if value["model"] is not None))
        .mark_line(point={"size": 45}, strokeWidth=2)
        .encode(k, alt.Y("model:Q"), color=alt.Color("law:N", scale=colours))
    )
    subtitle = (
        f"100 % is {show_bytes(plain.peak_bytes)}, without recompute; above each bar its time"
    )
    drawn: alt.TopLevelMixin = alt.layer(bars, times, law).properties(
        width=560, height=300, title=alt.TitleParams(title, subtitle=subtitle)
    )
    return drawn

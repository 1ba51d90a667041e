"""The page of a comparison: how held-out losses fell, where they ended, and the table."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..pictures import rows
from .grid import Cell
from .outcome import Comparison

if TYPE_CHECKING:
    import altair as alt

__all__ = ["picture", "table"]


def picture(comparison: Comparison, cells: Sequence[Cell], *, title: str) -> alt.TopLevelMixin:
    """Draw curves over targets seen, and the last losses of every seed with their mean.

    Args:
        comparison: What was found.
        cells: Whose folders hold the curves.
        title: Above the picture.
    """
    import altair as alt

    order = [row.variant for row in comparison.rows]
    colour = alt.Color("variant:N", sort=order, title=None)
    measured = _curves(cells)
    scale = alt.Scale(zero=False, domain=_domain(measured, comparison), nice=False)
    loss = alt.Y("loss:Q", title="held-out loss", scale=scale)
    curves = (
        alt.Chart(rows(measured))
        .mark_line(strokeWidth=2, opacity=0.85, clip=True)
        .encode(
            x=alt.X("step:Q", title="applied updates"),
            y=loss,
            color=colour,
            detail="seed:N",
            tooltip=["variant:N", "seed:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
        .properties(width=460, height=320)
    )
    ends = alt.Chart(rows(_ends(comparison))).encode(
        x=alt.X("loss:Q", title="held-out loss at the end", scale=alt.Scale(zero=False)),
        y=alt.Y("variant:N", sort=order, title=None, axis=alt.Axis(labelLimit=260)),
        color=colour,
    )
    points = ends.mark_point(filled=True, size=60, opacity=0.6)
    means = ends.mark_tick(thickness=3, size=22).encode(x="mean(loss):Q")
    right = alt.layer(points, means).properties(width=300, height=max(80, 36 * len(order)))
    drawn: alt.TopLevelMixin = alt.hconcat(curves, right, spacing=32).properties(title=title)
    return drawn


_STYLE = """<style>
.midstep { font: 13px/1.5 Inter, system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  color: #1f2328; margin: 0 16px 24px }
.midstep table { border-collapse: collapse; font-variant-numeric: tabular-nums }
.midstep th, .midstep td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap }
.midstep th { color: #57606a; font-weight: 500; border-bottom: 1px solid #d0d7de }
.midstep p { margin: 6px 0; max-width: 900px }
.midstep td:first-child, .midstep th:first-child { text-align: left }
</style>"""


def table(comparison: Comparison) -> str:
    """Give the table and what it shows in words, as HTML to stand under the picture.

    Args:
        comparison: What was found.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    head, *body = comparison.table()
    rows_of_it = "".join(line(row, "td") for row in body)
    words = "".join(f"<p>{html.escape(text)}</p>" for text in comparison.words())
    return (
        f'{_STYLE}<div class="midstep"><table>{line(head, "th")}{rows_of_it}</table>{words}</div>'
    )


def _domain(measured: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[float]:
    """Show where the runs end and what they fall from; a variant that starts far above is cut."""
    losses = [row["loss"] for row in measured] or [0.0, 1.0]
    ends = [loss for row in comparison.rows for loss in row.held_out if math.isfinite(loss)]
    low, top = min(losses), max([statistics.median(losses), *ends])
    margin = 0.15 * (top - low) or 0.1
    return [low - margin, top + margin]


def _curves(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    found = []
    for cell in cells:
        path = cell.path / "held_out.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            measured = json.loads(line)
            if isinstance(measured["loss_mean"], float) and math.isfinite(measured["loss_mean"]):
                found.append(
                    {
                        "variant": cell.variant.name,
                        "seed": cell.seed,
                        "step": measured["step"],
                        "loss": measured["loss_mean"],
                    }
                )
    return found


def _ends(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {"variant": row.variant, "loss": loss}
        for row in comparison.rows
        for loss in row.held_out
        if math.isfinite(loss)
    ]

"""The picture of a range test: losses over rates, what lies under the noise, and the bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..pictures import ACCENT, INK, MUTED, WARNING, rows
from .bounds import Outcome
from .sweep import RangeTest

if TYPE_CHECKING:
    import altair as alt

__all__ = ["picture"]

_NAMES = ("lower", "steepest", "upper", "ceiling")


def picture(test: RangeTest, *, title: str) -> alt.TopLevelMixin:
    """Draw it: points, smooth curves, the band to search in, and each bound with its interval.

    Args:
        test: What was found.
        title: Above the picture.
    """
    import altair as alt

    low, high = _visible(test)
    decades = range(math.floor(_exponents(test)[0]), math.ceil(_exponents(test)[1]) + 1)
    axis = alt.Axis(format="~e", values=[10.0**n for n in decades])
    scale = alt.Scale(domain=[low, high], nice=False)
    rate = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log"), axis=axis)
    loss = alt.Y("loss:Q", title="loss of the update at that rate", scale=scale)
    shown = [alt.Tooltip("lr:Q", format=".3e"), alt.Tooltip("loss:Q", format=".4f")]
    points = alt.Chart(rows(_points(test))).encode(rate, loss, tooltip=shown)
    lines = alt.Chart(rows(_lines(test))).encode(rate, loss, detail="curve:N")
    layers = [
        *_band(test),
        points.mark_point(filled=True, size=18, color=MUTED, opacity=0.5, clip=True),
        lines.mark_line(color=ACCENT, strokeWidth=2.5, clip=True),
        *_marks(test, high),
    ]
    heading = alt.TitleParams(title, subtitle=_subtitle(test))
    return alt.layer(*layers).properties(width=720, height=340, title=heading)


def _exponents(test: RangeTest) -> tuple[float, float]:
    rates = [lr for curve in test.curves for lr in curve.lr]
    return math.log10(min(rates)), math.log10(max(rates))


def _subtitle(test: RangeTest) -> str:
    reading = test.reading
    if reading.lower is None or reading.upper is None:
        return str(reading).split(":", maxsplit=1)[0] + ": no bounds"
    words = f"search between {reading.lower.lr:.1e} and {reading.upper.lr:.1e}"
    return (
        f"{words} (shaded); confidence {reading.confidence}; grey bars hold 80 % of redrawn curves"
    )


def _visible(test: RangeTest) -> tuple[float, float]:
    """Cut the blow-up off: it would press the fall flat."""
    smooth = [value for curve in test.reading.smooth for value in curve]
    losses = [x for curve in test.curves for x in curve.loss_mean if math.isfinite(x)]
    start = sorted(losses[: max(5, len(losses) // 10)] or [0.0, 1.0])
    low, top = min([*smooth, *losses], default=0.0), start[-1]
    margin = 0.25 * (top - low) or 1.0
    return low - 0.2 * margin, top + margin


def _points(test: RangeTest) -> list[dict[str, Any]]:
    return [
        {"lr": lr, "loss": loss, "curve": index}
        for index, curve in enumerate(test.curves)
        for lr, loss in zip(curve.lr, curve.loss_mean, strict=True)
        if math.isfinite(loss)
    ]


def _lines(test: RangeTest) -> list[dict[str, Any]]:
    return [
        {"lr": lr, "loss": loss, "curve": index}
        for index, (curve, smooth) in enumerate(zip(test.curves, test.reading.smooth, strict=True))
        for lr, loss in zip(curve.lr, smooth, strict=False)
    ]


def _band(test: RangeTest) -> list[alt.Chart]:
    import altair as alt

    reading = test.reading
    if reading.outcome is not Outcome.DESCENT or reading.lower is None or reading.upper is None:
        return []
    band = alt.Chart(rows([{"from": reading.lower.lr, "to": reading.upper.lr}]))
    return [band.mark_rect(color=ACCENT, opacity=0.09).encode(x="from:Q", x2="to:Q")]


def _marks(test: RangeTest, high: float) -> list[alt.Chart]:
    import altair as alt

    found = {name: getattr(test.reading, name) for name in _NAMES}
    base = alt.Chart(
        rows(
            {
                "name": f"{name} {bound.lr:.1e}",
                "lr": bound.lr,
                "low": bound.low,
                "high": bound.high,
                "loss": high,
                "kind": name,
            }
            for name, bound in found.items()
            if bound is not None
        )
    )
    colour = alt.condition("datum.kind == 'ceiling'", alt.value(WARNING), alt.value(INK))
    words = base.mark_text(
        fontSize=11, angle=270, align="right", baseline="bottom", dx=-10, dy=-3, y=0
    )
    return [
        base.mark_rule(strokeDash=[4, 3]).encode(x="lr:Q", color=colour),
        base.mark_rule(strokeWidth=5, opacity=0.25, color=INK, y=4).encode(x="low:Q", x2="high:Q"),
        words.encode(x="lr:Q", text="name:N", color=colour),
    ]

"""Pictures: one look for every chart, and the file it goes to.

A chart is a Vega-Lite specification made with altair. It can be a page that opens offline, a bitmap
or a drawing; nothing is fetched when it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt

__all__ = [
    "ACCENT",
    "INK",
    "MUTED",
    "PALETTE",
    "WARNING",
    "check_picture_path",
    "rows",
    "save_picture",
]

INK, MUTED, ACCENT, WARNING = "#1f2328", "#8c959f", "#0072b2", "#d55e00"
# Okabe and Ito's colours: told apart by everybody, in print and on either ground.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#f0e442", "#000000")
_SUFFIXES = (".png", ".svg", ".html")
_FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def check_picture_path(path: Path) -> None:
    """Refuse a file that no picture can be written to, before any work is done for it.

    Raises:
        ValueError: Its suffix is none of .png, .svg and .html.
        NotADirectoryError: Its folder is not there.
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"`{path}`: a picture is written as {', '.join(_SUFFIXES)}, and the end of the name "
            "says which."
        )
    if not path.parent.is_dir():
        raise NotADirectoryError(20, "no such folder", str(path.parent))


def rows(values: Iterable[Mapping[str, Any]]) -> alt.Data:
    """Give the rows of a chart, as altair takes them; inf and nan must be left out.

    Args:
        values: One mapping a row, from names of fields to numbers and words.
    """
    import altair as alt

    return alt.Data(values=list(values))  # type: ignore[no-untyped-call]


def save_picture(
    chart: alt.TopLevelMixin, path: Path, *, title: str, below: str | None = None
) -> None:
    """Write a chart to a file, in the form its suffix names.

    Args:
        chart: What `altair` made.
        path: Ends in .png (twice the pixels, for sharp screens), .svg or .html.
        title: Of the page, for those who do not see the picture, too.
        below: HTML that stands under the picture in a page; other forms leave it out.
    """
    import altair as alt

    check_picture_path(path)
    specification = chart.to_dict()
    specification["config"] = _config()
    specification.setdefault("description", title)
    dressed = alt.Chart.from_dict(specification)
    if path.suffix == ".html":
        page = dressed.to_html(inline=True, embed_options={"actions": False})
        head, end, tail = page.rpartition("</body>")
        path.write_text(f"{head}{below or ''}{end}{tail}", encoding="utf-8")
    else:
        dressed.save(str(path), scale_factor=2.0 if path.suffix == ".png" else 1.0)


def _config() -> dict[str, Any]:
    grid = {"gridColor": "#e6e8eb", "gridWidth": 1, "domain": False, "ticks": False}
    label = {"labelColor": "#57606a", "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12}
    return {
        "font": _FONT,
        "background": "white",
        "padding": 16,
        "view": {"stroke": None},
        "axis": {**grid, **label, "titleFontWeight": 500, "labelPadding": 6, "titlePadding": 10},
        "legend": {**label, "titleFontWeight": 500, "symbolStrokeWidth": 3, "labelLimit": 0},
        "title": {
            "anchor": "start",
            "color": INK,
            "fontSize": 15,
            "fontWeight": 600,
            "subtitleColor": "#57606a",
            "subtitleFontSize": 12,
            "offset": 12,
        },
        "range": {"category": list(PALETTE)},
    }

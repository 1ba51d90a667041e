"""Pictures: one look for every chart, and the file it goes to.

A chart is a Vega-Lite specification made with altair. It can be a page that opens offline, a bitmap
or a drawing; nothing is fetched when it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .theme import LIGHT

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

INK, MUTED, ACCENT, WARNING = LIGHT.ink, "#8c959f", LIGHT.category[0], LIGHT.category[1]
PALETTE = LIGHT.category
_SUFFIXES = (".png", ".svg", ".html")


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
    """The look of the report's page, with the air and the larger words of a picture alone."""
    config = LIGHT.config()
    label = {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500}
    heading = {"fontSize": 15, "fontWeight": 600, "subtitleFontSize": 12, "offset": 12}
    return {
        **config,
        "background": LIGHT.paper,
        "padding": 16,
        "axis": {**config["axis"], **label, "titleColor": LIGHT.ink, "titlePadding": 10},
        "axisX": {},
        "axisY": {},
        "legend": {**config["legend"], **label, "symbolStrokeWidth": 3, "labelLimit": 0},
        "title": {**config["title"], **heading},
    }

"""Colours and type of the charts, light and dark. The page takes the same colours for its own."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["DARK", "LIGHT", "Theme"]

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"


@dataclasses.dataclass(frozen=True, slots=True)
class Theme:
    """One set of colours.

    Attributes:
        paper: Behind a panel.
        ground: Behind the panels.
        ink: Text.
        faint: Labels of axes and what is said in passing.
        line: Grid and borders.
        category: Of runs and series; told apart by people who see fewer colours, too.
        ends: Of `applied`, `skipped_nonfinite`, `skipped_empty`, `skipped_spike`.
        good: A clean run.
        bad: A finding.
    """

    paper: str
    ground: str
    ink: str
    faint: str
    line: str
    category: tuple[str, ...]
    ends: tuple[str, ...]
    good: str
    bad: str

    def config(self) -> dict[str, Any]:
        """Give the colours and the type as the config of a chart."""
        axis = {
            "domain": False,
            "ticks": False,
            "gridColor": self.line,
            "gridWidth": 1,
            "labelColor": self.faint,
            "labelFontSize": 11,
            "labelPadding": 6,
            "titleColor": self.faint,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
        }
        return {
            "background": "transparent",
            "font": FONT,
            "view": {"stroke": None},
            "axis": axis,
            "axisX": {"grid": False, "titlePadding": 8, "labelFlush": True},
            "axisY": {
                "titleAngle": 0,
                "titleAlign": "left",
                "titleAnchor": "end",
                "titleX": 0,
                "titleY": -10,
                "titleBaseline": "bottom",
                "minExtent": 42,
            },
            "legend": {
                "labelColor": self.faint,
                "titleColor": self.faint,
                "labelFontSize": 11,
                "titleFontSize": 11,
                "titleFontWeight": "normal",
                "gradientThickness": 8,
            },
            "title": {"color": self.ink, "subtitleColor": self.faint, "anchor": "start"},
            "range": {"category": list(self.category)},
        }


# Okabe and Ito's colours, with the ones that are too pale on white made darker, and the reverse.
LIGHT = Theme(
    paper="#ffffff",
    ground="#f5f6f8",
    ink="#1c2330",
    faint="#5d6675",
    line="#e6e9ee",
    category=(
        *("#0b6bb5", "#d1620a", "#00805f", "#b0488a"),
        *("#6a5acd", "#8a6d00", "#2b9fc9", "#55606f"),
    ),
    ends=("#b9c6d3", "#c8361d", "#d99a00", "#b0488a"),
    good="#00805f",
    bad="#c8361d",
)
DARK = Theme(
    paper="#181d26",
    ground="#10141b",
    ink="#e8ecf2",
    faint="#9aa5b5",
    line="#2a313d",
    category=(
        *("#5db2f2", "#f2a154", "#3fc79a", "#e294c4"),
        *("#a89cf0", "#d8c04a", "#93dcf5", "#aab4c2"),
    ),
    ends=("#445265", "#ff6b52", "#f0b93a", "#e294c4"),
    good="#3fc79a",
    bad="#ff7d66",
)

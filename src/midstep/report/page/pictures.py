"""Pictures: the charts of the page as PNG, all together and one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...theme import DARK, LIGHT, Theme
from ..run import Run
from ..verdict import judge
from .charts import finished
from .data import drawn, share_of_budget
from .panel import Panel
from .panels import panels_of
from .tables import TABLE, smooth
from .thinning import kept_rows

__all__ = ["write_pictures"]

_WIDTHS = {"wide": 1180, "half": 560, "third": 350}
_SCALE = 2.0
_FONT = "Liberation Sans"  # it comes with vl-convert, so pictures are the same everywhere
# Each panel has colours of its own.
_APART = {"scale": {"color": "independent", "stroke": "independent", "strokeDash": "independent"}}


def write_pictures(runs: Sequence[Run], folder: Path, *, dark: bool = False) -> list[Path]:
    """Write `report.png`, with every panel, and a picture for each of them.

    Args:
        runs: At least one.
        folder: Where; it is made.
        dark: In the colours for dark paper.

    Returns:
        The files that were written.

    Raises:
        OSError: One cannot be written.
    """
    import vl_convert

    theme = DARK if dark else LIGHT
    folder.mkdir(parents=True, exist_ok=True)
    panels = panels_of(runs, theme)
    specs = [_spec_of(panel, runs) for panel in panels]
    written = []
    for panel, spec in zip(panels, specs, strict=True):
        path = folder / f"{panel.id}.png"
        path.write_bytes(vl_convert.vegalite_to_png(_alone(spec, theme), scale=_SCALE))
        written.append(path)
    path = folder / "report.png"
    path.write_bytes(vl_convert.vegalite_to_png(_together(panels, specs, runs, theme), scale=1.5))
    return [path, *written]


def _together(
    panels: Sequence[Panel], specs: Sequence[dict[str, Any]], runs: Sequence[Run], theme: Theme
) -> dict[str, Any]:
    """Lay the panels out as the page does: rows of one, two or three."""
    rows: list[list[dict[str, Any]]] = []
    room = 0
    for panel, spec in zip(panels, specs, strict=True):
        size = {"wide": 6, "half": 3, "third": 2}[panel.size]
        if room < size or (rows and len(rows[-1]) and _size_of(rows[-1][-1]) != spec["width"]):
            rows.append([])
            room = 6
        rows[-1].append(spec)
        room -= size
    return _alone(
        {
            "vconcat": [{"hconcat": row, "spacing": 40, "resolve": _APART} for row in rows],
            "spacing": 32,
            "resolve": _APART,
            "title": {
                "text": ", ".join(run.name for run in runs),
                "subtitle": [judge(run).headline for run in runs],
                "fontSize": 18,
                "subtitleFontSize": 12,
                "offset": 18,
            },
        },
        theme,
    )


def _size_of(spec: dict[str, Any]) -> int:
    return int(spec["width"])


def _alone(spec: dict[str, Any], theme: Theme) -> dict[str, Any]:
    config = theme.config() | {"background": theme.paper, "padding": 18}
    config["font"] = _FONT
    return {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "config": config, **spec}


def _spec_of(panel: Panel, runs: Sequence[Run]) -> dict[str, Any]:
    lo = min(float(run.updates[0]) for run in runs)
    hi = max(float(run.updates[-1]) for run in runs)
    spec = finished(panel.chart, height=panel.height, lo=lo, hi=max(hi, lo + 1))
    spec = copy.deepcopy(spec)
    spec.pop("$schema", None)
    # A concatenation has one set of parameters; a picture is not zoomed, so numbers will do.
    text = {"lo": lo, "hi": max(hi, lo + 1)}
    spec.pop("params", None)
    rows = {name: _rows(table) for name, table in panel.tables.items()}
    if panel.lines:
        rows["lines"] = _line_rows(panel, runs)
    _fill(spec, text, rows)
    spec["width"] = _WIDTHS[panel.size]
    spec["title"] = {
        "text": panel.title,
        "subtitle": panel.note + _key(panel),
        "fontSize": 13,
        "subtitleFontSize": 11,
        "offset": 22 if panel.lines or panel.groups else 8,
    }
    if len(panel.groups) > 1:
        _with_legend(spec)
    return spec


def _key(panel: Panel) -> str:
    if panel.id != "verdicts":
        return ""
    present = sorted(set(panel.tables["ticks"]["g"]) - {"applied"})
    words = ", ".join(name.removeprefix("skipped_") for name in present)
    return f"; skipped: {words}" if present else "; none was skipped"


def _with_legend(spec: dict[str, Any]) -> None:
    layers = spec.get("layer", [spec])
    # Where there are lines their legend will do; that of a band would be as faint as the band.
    lined = [layer for layer in layers if layer["mark"]["type"] == "line"]
    for layer in lined or layers:
        shape = "stroke" if lined else "square"
        legend = {"title": None, "orient": "bottom", "symbolType": shape, "symbolOpacity": 1}
        layer["encoding"]["color"]["legend"] = legend


def _fill(node: Any, numbers: dict[str, float], rows: dict[str, list[dict[str, Any]]]) -> None:
    """Put numbers in the place of parameters, and rows in the place of names of tables."""
    if isinstance(node, list):
        for item in node:
            _fill(item, numbers, rows)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if isinstance(value, dict) and set(value) == {"expr"} and value["expr"] in numbers:
            node[key] = numbers[value["expr"]]
        elif key == "data" and isinstance(value, dict) and value.get("name") in rows:
            node[key] = {"values": rows[value["name"]]}
        else:
            _fill(value, numbers, rows)


def _rows(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _line_rows(panel: Panel, runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(panel.lines):
        run = runs[line.run]
        column = line.column.removesuffix(TABLE)
        values = drawn(run).get(column)
        if values is None:
            continue
        if column != line.column:
            values = smooth(values, log=panel.log)
        known = np.isfinite(values) & ((values > 0) if panel.log else True)
        kept = kept_rows([values], np.zeros(len(run), dtype=bool), share_of_budget(runs) // 4)
        rows += [
            {
                "u": float(run.updates[row]),
                "v": float(values[row]),
                "g": line.group,
                "k": number,
                "o": line.opacity,
                "w": line.width,
                "d": int(line.dashed),
            }
            for row in kept
            if known[row]
        ]
    return rows

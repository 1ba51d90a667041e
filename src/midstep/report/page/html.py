"""HTML: the one file. Everything the page needs is in it, and it may load nothing else.

What it says in words stands in the file as text, so that it is read where no script runs; the
charts are drawn by the script, from the data beside it.
"""

from __future__ import annotations

import functools
import html
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...theme import DARK, LIGHT, Theme
from ..run import Floats, Run
from ..verdict import judge
from ..verdict.measures import short
from .charts import finished
from .data import drawn, panel_data, run_data, share_of_budget
from .panel import Panel
from .panels import missing, panels_of
from .words import findings_html, panels_html, runs_html

__all__ = ["page_of", "parts_of_page", "payload", "write_page"]

_PARTS = 10  # rows of the table below a chart


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page. About 1 MB, and at most 2 MB more for each run, however long.

    Args:
        runs: At least one.
        path: The file; it is replaced whole.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(path.name + ".part")
    part.write_text(page_of(runs), encoding="utf-8")
    part.replace(path)


def payload(runs: Sequence[Run]) -> dict[str, Any]:
    """Give what the script draws.

    Args:
        runs: At least one.
    """
    judgements = [judge(run) for run in runs]
    lo = min(float(run.updates[0]) for run in runs)
    hi = max(float(run.updates[-1]) for run in runs)
    hi = max(hi, lo + 1)
    panels = panels_of(runs, LIGHT)
    budget = share_of_budget(runs)
    return {
        "lo": lo,
        "hi": hi,
        "runs": [
            run_data(run, judgement, budget=budget)
            for run, judgement in zip(runs, judgements, strict=True)
        ],
        "panels": [
            panel_data(panel, finished(panel.chart, height=panel.height, lo=lo, hi=hi))
            | {"note": panel.note, "label": _label(panel, runs), "table": _table(panel, runs)}
            for panel in panels
        ],
        "missing": missing(panels),
        "themes": {name: _theme(theme) for name, theme in (("light", LIGHT), ("dark", DARK))},
    }


def page_of(runs: Sequence[Run], *, watching: str | None = None) -> str:
    """Give the page as text.

    Args:
        runs: At least one.
        watching: What the server it comes from calls the state it shows; it asks there for what
            is new. None for a page that is a file.
    """
    data = payload(runs)
    # The title first: what is put in after it may hold an `@` of its own.
    words = {
        "TITLE": html.escape(", ".join(run.name for run in runs)),
        "POLICY": "connect-src 'self'; " if watching is not None else "",
        "STYLE": _resource("page.css") + _css_of(LIGHT, DARK),
        "BODY": _body(data),
        # In a script element only `</script` and `<!--` could end it early.
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "VEGA": _vega(),
        "SCRIPT": _resource("data.js") + _resource("charts.js") + _resource("page.js"),
        "WATCHING": json.dumps(watching).replace("<", "\\u003c"),
    }
    page = _resource("page.html")
    for name, text in words.items():
        page = page.replace(f"@{name}@", text)
    return page


def parts_of_page(data: dict[str, Any]) -> dict[str, str]:
    """Give the parts of the page that change while a run goes on, by the id of their place.

    Args:
        data: What the script draws.
    """
    return {
        "facts": runs_html(data["runs"]),
        "verdict": findings_html(data["runs"]),
        "panels": panels_html(data),
        "foot": _foot(data),
    }


def _body(data: dict[str, Any]) -> str:
    return "\n".join(f'<div id="{name}">{part}</div>' for name, part in parts_of_page(data).items())


def _foot(data: dict[str, Any]) -> str:
    words = [_thinned_html(run) for run in data["runs"] if run["kept"] < run["updates"]]
    for run in data["runs"]:
        if run["names"]:
            guessed = ", ".join(
                f"{html.escape(name)} is <code>{html.escape(column)}</code>"
                for name, column in run["names"].items()
            )
            words.append(
                f"<p><b>Columns</b> of {html.escape(run['name'])} ({html.escape(run['kind'])}): "
                f"{guessed}.</p>"
            )
    if data["missing"]:
        words.append(f"<p><b>Not recorded:</b> {', '.join(data['missing'])}.</p>")
    return f"<footer>{''.join(words)}</footer>"


def _thinned_html(run: dict[str, Any]) -> str:
    return (
        f"<p><b>Thinned.</b> Of the {run['updates']:,} updates of {html.escape(run['name'])} "
        f"{run['kept']:,} are drawn: of each part of the run its first and last update, and for "
        "each quantity the one with the lowest and the one with the highest value; every skipped "
        "update, too. Shares, means, cells of the maps and the verdict are of all updates.</p>"
    )


def _theme(theme: Theme) -> dict[str, Any]:
    return {"config": theme.config(), "ends": list(theme.ends)}


def _css_of(light: Theme, dark: Theme) -> str:
    def variables(theme: Theme) -> str:
        plain = {n: getattr(theme, n) for n in ("paper", "ground", "ink", "faint", "line", "good")}
        plain["bad"] = theme.bad
        plain |= {f"c{i}": color for i, color in enumerate(theme.category)}
        plain |= {f"e{i}": color for i, color in enumerate(theme.ends)}
        return "".join(f"--{name}:{value};" for name, value in plain.items())

    return (
        f":root{{color-scheme:light;{variables(light)}}}\n"
        "@media (prefers-color-scheme:dark){:root:not([data-theme=light]){color-scheme:dark;"
        f"{variables(dark)}}}}}\n:root[data-theme=dark]{{color-scheme:dark;{variables(dark)}}}\n"
    )


def _label(panel: Panel, runs: Sequence[Run]) -> str:
    """Say what a chart shows to somebody who does not see it."""
    words = []
    for line in panel.lines:
        run = runs[line.run]
        values = _values(run, line.column)
        if line.dashed or values is None:
            continue
        known = np.flatnonzero(np.isfinite(values))
        if len(known) == 0:
            continue
        low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
        words.append(
            f"{run.name}: from {short(values[known[0]])} to {short(values[known[-1]])}, lowest "
            f"{short(values[low])} at update {int(run.updates[low]):,}, highest "
            f"{short(values[high])} at update {int(run.updates[high]):,}"
        )
    return ". ".join([f"{panel.title}, {panel.note}", *words])


def _table(panel: Panel, runs: Sequence[Run]) -> list[list[str]]:
    """Ten rows that say in numbers what a chart draws; empty where it is no line."""
    rows: list[list[str]] = []
    for line in panel.lines:
        values = _values(runs[line.run], line.column)
        if line.dashed or values is None:
            continue
        for part in np.array_split(np.arange(len(values)), min(_PARTS, len(values))):
            known = values[part][np.isfinite(values[part])]
            span = [int(runs[line.run].updates[part[index]]) for index in (0, -1)]
            if len(known):
                measures = (known.min(), float(np.median(known)), known.max())
                cells = [short(float(value)) for value in measures]
                rows.append([runs[line.run].name, f"{span[0]:,} to {span[1]:,}", *cells])
    return rows


def _values(run: Run, column: str) -> Floats | None:
    return drawn(run).get(column)


@functools.cache
def _resource(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _vega() -> str:
    """The libraries that draw, as one script. Costs two seconds, once."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg] # its stub is stricter
    return bundle.replace("</script", "<\\/script")

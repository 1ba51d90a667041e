"""Words of the page: runs and facts, the verdict, and the frame of each panel, as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

__all__ = ["findings_html", "panels_html", "runs_html"]

_ENDS = ("applied", "not finite", "empty", "spike")


def runs_html(runs: Sequence[dict[str, Any]]) -> str:
    """Facts: tiles for one run, a table for several.

    Args:
        runs: As the script is given them.
    """
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{html.escape(name)}</dt>{_fact_html(words)}</div>"
            for name, words in runs[0]["facts"].items()
        )
        return f'<dl class="facts" aria-label="Facts">{tiles}</dl>'
    names = list(dict.fromkeys(name for run in runs for name in run["facts"]))
    head = "".join(
        f'<th scope="col"><i class="key" style="--c:var(--c{i % 6})"></i>'
        f"{html.escape(run['name'])}</th>"
        for i, run in enumerate(runs)
    )
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(run['facts'].get(name, '-'))}</td>" for run in runs)
        + "</tr>"
        for name in names
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Facts of each run">'
        f'<table class="facts"><tr><th scope="col">run</th>{head}</tr>{rows}</table></div>'
    )


def findings_html(runs: Sequence[dict[str, Any]]) -> str:
    """The verdict of each run, with a button that shows the updates a finding is about.

    Args:
        runs: As the script is given them.
    """
    blocks = []
    for index, run in enumerate(runs):
        state = "bad" if run["findings"] else "good"
        sign = "!" if run["findings"] else "&#10003;"
        items = "".join(_finding_html(finding) for finding in run["findings"])
        silent = ""
        if not run["findings"] and run["not_judged"]:
            names = html.escape(", ".join(run["not_judged"]))
            silent = f'<p class="look">Not judged, since nothing of it was recorded: {names}.</p>'
        key = f'<i class="key" style="--c:var(--c{index % 6})"></i>' if len(runs) > 1 else ""
        blocks.append(
            f'<div class="verdict {state}"><h2><span class="sign" aria-hidden="true">{sign}</span>'
            f"{key}{html.escape(run['headline'])}</h2>"
            + (f"<ul>{items}</ul>" if items else "")
            + silent
            + "</div>"
        )
    return f'<section class="verdicts" aria-label="Verdict">{"".join(blocks)}</section>'


def panels_html(data: dict[str, Any]) -> str:
    """The frame of each panel: its title, its key, a place for the chart, and a table.

    Args:
        data: As the script is given it.
    """
    frames = "".join(_panel_html(panel) for panel in data["panels"])
    return f'<div class="panels">{frames}</div>'


def _finding_html(finding: dict[str, Any]) -> str:
    first, last = finding["updates"]
    where = f"update {first:,}" if first == last else f"updates {first:,} to {last:,}"
    return (
        f"<li><h3>{_code(finding['title'])}</h3><p>{_code(finding['seen'])}</p>"
        f'<p class="look">Look at {_code(finding["look"])}</p>'
        f'<button type="button" class="show" data-first="{first}" data-last="{last}">'
        f"Show {where}</button></li>"
    )


def _panel_html(panel: dict[str, Any]) -> str:
    groups = panel["groups"]
    items = list(groups) if len(groups) > 1 else []
    key = "".join(
        f'<li><i class="key" style="--c:var(--c{i % 6})"></i>{html.escape(group)}</li>'
        for i, group in enumerate(items)
    )
    if panel["id"] == "verdicts":
        present = set(panel["tables"]["ticks"]["g"])
        codes = ("applied", "skipped_nonfinite", "skipped_empty", "skipped_spike")
        key = "".join(
            f'<li><i class="key box" style="--c:var(--e{i})"></i>{name}</li>'
            for i, (name, code) in enumerate(zip(_ENDS, codes, strict=True))
            if code in present
        )
    legend = f'<ul class="legend">{key}</ul>' if key else ""
    return (
        f'<section class="panel {panel["size"]}" id="panel-{panel["id"]}" '
        f'aria-labelledby="title-{panel["id"]}">'
        f'<header><h2 id="title-{panel["id"]}">{html.escape(panel["title"])}</h2>'
        f"<p>{html.escape(panel['note'])}</p>{legend}</header>"
        f'<div class="chart" tabindex="0" role="img" data-panel="{panel["id"]}" '
        f'style="min-height:{panel["height"] + 40}px" '
        f'aria-label="{html.escape(panel["label"])}"></div>{_table_html(panel)}</section>'
    )


def _table_html(panel: dict[str, Any]) -> str:
    if not panel["table"]:
        return ""
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("run", "updates", "lowest", "median", "highest")
    )
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in panel["table"]
    )
    return (
        f"<details><summary>In numbers</summary><div class=scroll><table><tr>{head}</tr>{rows}"
        "</table></div></details>"
    )


def _fact_html(words: str) -> str:
    """The first figure large, what follows it small."""
    first, _, rest = words.partition(", ")
    small = f"<dd class=rest>{html.escape(rest)}</dd>" if rest else ""
    return f"<dd>{html.escape(first)}</dd>{small}"


def _code(text: str) -> str:
    """Set what stands between backticks as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))

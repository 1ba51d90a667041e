"""Panels: what is shown of the runs, in which order, from which columns.

A panel is there when a run has something for it. What none has is listed at the end of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...theme import Theme
from ..run import Run
from .charts import heat_chart, line_chart, stack_chart, strip_chart
from .panel import Line, Panel, constant, having, joined, plain, smoothed
from .tables import Table, cells, ends, mean_of, shares, stages

__all__ = ["missing", "panels_of"]

Maker = Callable[[Sequence[Run]], Panel | None]

_STAGES = ("data", "forward", "backward", "measure", "step")


def panels_of(runs: Sequence[Run], theme: Theme) -> list[Panel]:
    """Give the panels that these runs have something for.

    Args:
        runs: At least one.
        theme: Light or dark.
    """
    makers: tuple[Maker, ...] = (
        _strip(theme),
        _loss,
        _norm,
        _clipped,
        _coefficient,
        _rate,
        _scale,
        _targets,
    )
    makers += (_update_size, _noise, _time, _speed, _memory, _ratios, _norms)
    return [panel for make in makers if (panel := make(runs)) is not None]


def missing(panels: Sequence[Panel]) -> list[str]:
    """Name what no run has recorded.

    Args:
        panels: Those that the runs have something for.
    """
    have = {panel.id for panel in panels}
    names = {
        "loss": "loss",
        "norm": "gradient norm",
        "clipped": "clipped updates",
        "rate": "rate",
        "targets": "targets per update",
        "size": "size of the update",
        "noise": "gradient noise scale",
        "time": "time",
        "memory": "memory",
        "ratios": "update-to-weight ratio by layer",
        "norms": "gradient norm by layer",
    }
    return [words for name, words in names.items() if name not in have]


def _strip(theme: Theme) -> Callable[[Sequence[Run]], Panel | None]:
    def make(runs: Sequence[Run]) -> Panel | None:
        return Panel(
            id="verdicts",
            title="How each update ended",
            note="applied, or skipped and why; every skipped update is drawn",
            size="wide",
            height=18 * len(runs) + 6 * (len(runs) - 1),
            chart=strip_chart([run.name for run in runs], theme),
            tables={"ticks": joined(ends(run) for run in runs)},
        )

    return make


def _loss(runs: Sequence[Run]) -> Panel | None:
    indices = having(runs, "loss_mean")
    points = [run for run in runs if run.held_out is not None]
    if not indices and not points:
        return None
    several = len(runs) > 1
    groups = [run.name for run in runs] if several else ["training", "held-out"]
    lines = list(smoothed(runs, indices, "loss_mean", groups))
    table: list[Table] = []
    for index, run in enumerate(runs):
        if run.held_out is not None:
            group = run.name if several else "held-out"
            updates, values = run.held_out.updates.tolist(), run.held_out.values.tolist()
            table.append(constant(len(values), g=group, k=index) | {"u": updates, "v": values})
    tables = {"points": joined(table)} if table else {}
    note = "mean over the targets of an update; points are held-out losses"
    return Panel(
        id="loss",
        title="Loss",
        note=note if table else "mean over the targets of an update",
        size="half",
        height=250,
        chart=line_chart("loss", groups, tables=("lines", *tables)),
        lines=lines,
        tables=tables,
        groups=groups if table or several else groups[:1],
    )


def _norm(runs: Sequence[Run]) -> Panel | None:
    indices = having(runs, "grad_norm")
    if not indices:
        return None
    several = len(runs) > 1
    groups = [run.name for run in runs] if several else ["norm", "threshold"]
    lines = list(smoothed(runs, indices, "grad_norm", groups))
    limited = [index for index in indices if np.isfinite(runs[index].threshold).any()]
    for index in limited:
        group = runs[index].name if several else "threshold"
        lines.append(Line(run=index, column="threshold", group=group, dashed=True))
    known = all(runs[index].is_norm_true for index in indices)
    return Panel(
        id="norm",
        title="Gradient norm before clipping" if known else "Gradient norm",
        note="log scale" + ("; the dashed line is the threshold" if limited else ""),
        size="half",
        height=250,
        chart=line_chart("norm", groups, log=True),
        lines=lines,
        groups=groups if limited or several else groups[:1],
        log=True,
    )


def _clipped(runs: Sequence[Run]) -> Panel | None:
    tables = [shares(run) for run in runs if np.isfinite(run.clipped).any()]
    if not tables:
        return None
    groups = [run.name for run in runs]
    return Panel(
        id="clipped",
        title="Clipped updates",
        note="share of the updates in each part of the run",
        size="third",
        height=170,
        chart=line_chart("of applied updates", groups, zero=True, format=".0%"),
        tables={"lines": joined(tables)},
        groups=groups,
    )


def _coefficient(runs: Sequence[Run]) -> Panel | None:
    indices = [i for i, run in enumerate(runs) if bool((run.coefficient < 1.0).any())]
    return plain(
        runs,
        indices,
        "coefficient",
        id="coefficient",
        title="Clip coefficient",
        note="what the gradient was multiplied by; 1 is untouched",
        unit="coefficient",
        zero=True,
    )


def _rate(runs: Sequence[Run]) -> Panel | None:
    return plain(
        runs,
        having(runs, "lr"),
        "lr",
        id="rate",
        title="Rate",
        note="of the first parameter group, as each update used it",
        unit="learning rate",
        zero=True,
        width=2.0,
    )


def _scale(runs: Sequence[Run]) -> Panel | None:
    indices = having(runs, "loss_scale")
    indices = [i for i in indices if bool((np.abs(runs[i].column("loss_scale") - 1.0) > 0).any())]
    return plain(
        runs,
        indices,
        "loss_scale",
        id="scale",
        title="Loss scale",
        note="log scale to base 2; a fall is an overflow",
        unit="scale",
        log=True,
        base=2,
        width=2.0,
    )


def _targets(runs: Sequence[Run]) -> Panel | None:
    return plain(
        runs,
        having(runs, "targets"),
        "targets",
        id="targets",
        title="Targets per update",
        note="what the mean loss is over: the effective batch",
        unit="targets",
        zero=True,
        format="~s",
    )


def _update_size(runs: Sequence[Run]) -> Panel | None:
    indices = having(runs, "update_norm")
    if not indices:
        return None
    several = len(runs) > 1
    groups = [run.name for run in runs] if several else ["actual", "rate x norm"]
    lines = [Line(run=i, column="update_norm", group=groups[i if several else 0]) for i in indices]
    naive = [i for i in indices if runs[i].has("naive_update_norm")]
    lines += [
        Line(run=i, column="naive_update_norm", group=groups[i if several else 1], dashed=True)
        for i in naive
    ]
    return Panel(
        id="size",
        title="Size of the update",
        note="norm of what the weights moved by"
        + ("; dashed: rate x gradient norm" if naive else ""),
        size="third",
        height=170,
        chart=line_chart("norm", groups, log=True),
        lines=lines,
        groups=groups if naive or several else groups[:1],
        log=True,
    )


def _noise(runs: Sequence[Run]) -> Panel | None:
    indices = having(runs, "noise_scale")
    if not indices:
        return None
    several = len(runs) > 1
    groups = [run.name for run in runs] if several else ["noise scale", "targets per update"]
    lines, bands = list[Line](), list[Table]()
    for i in indices:
        lines.append(Line(run=i, column="noise_scale", group=groups[i if several else 0], width=2))
        lines.append(Line(run=i, column="targets", group=groups[i if several else 1], dashed=True))
        low, high = runs[i].column("noise_scale_low"), runs[i].column("noise_scale_high")
        kept = np.flatnonzero(np.isfinite(low) & np.isfinite(high) & (low > 0))
        kept = kept[:: max(1, len(kept) // 500)]
        bands.append(
            constant(len(kept), g=groups[i if several else 0])
            | {
                name: values[kept].tolist()
                for name, values in (("u", runs[i].updates), ("v0", low), ("v1", high))
            }
        )
    has_band = any(table["u"] for table in bands)
    return Panel(
        id="noise",
        title="Gradient noise scale",
        note="log scale; the band is its uncertainty, dashed is the effective batch",
        size="third",
        height=170,
        chart=line_chart(
            "targets", groups, log=True, tables=(*(("bands",) if has_band else ()), "lines")
        ),
        lines=lines,
        tables={"bands": joined(bands)} if has_band else {},
        groups=groups,
        log=True,
    )


def _time(runs: Sequence[Run]) -> Panel | None:
    names = [f"stage_{stage}" for stage in _STAGES]
    first = next((run for run in runs if any(run.has(name) for name in names)), None)
    if first is None:
        return plain(
            runs,
            having(runs, "seconds"),
            "seconds",
            id="time",
            title="Time per update",
            note="from asking for its first batch to its verdict",
            unit="seconds",
            zero=True,
        )
    groups = [stage for stage, name in zip(_STAGES, names, strict=True) if first.has(name)]
    of = f" of {first.name}" if len(runs) > 1 else ""
    return Panel(
        id="time",
        title=f"Time by stage{of}",
        note="mean of each part of the run",
        size="third",
        height=170,
        chart=stack_chart("seconds", groups),
        tables={"lines": stages(first, groups)},
        groups=groups,
    )


def _speed(runs: Sequence[Run]) -> Panel | None:
    indices = [i for i, run in enumerate(runs) if np.isfinite(run.targets_per_second).any()]
    if not indices:
        return None
    groups = [run.name for run in runs]
    tables = [mean_of(runs[i], runs[i].targets_per_second, key=i) for i in indices]
    return Panel(
        id="speed",
        title="Throughput",
        note="targets a second, mean of each part of the run",
        size="third",
        height=170,
        chart=line_chart("targets/s", groups, zero=True, format="~s"),
        tables={"lines": joined(tables)},
        groups=groups,
    )


def _memory(runs: Sequence[Run]) -> Panel | None:
    return plain(
        runs,
        having(runs, "memory_bytes"),
        "memory_bytes",
        id="memory",
        title="Memory",
        note="as the allocator of the device counts it, or the process on a CPU",
        unit="bytes",
        zero=True,
        format="~s",
    )


def _ratios(runs: Sequence[Run]) -> Panel | None:
    return _heat(
        runs,
        "update_to_weight",
        id="ratios",
        title="Update-to-weight ratio by layer",
        note="norm of the update over norm of the weights; about 0.001 is usual",
    )


def _norms(runs: Sequence[Run]) -> Panel | None:
    return _heat(
        runs,
        "grad_norms",
        id="norms",
        title="Gradient norm by layer",
        note="of each tensor, before clipping; the largest in each part of the run",
    )


def _heat(runs: Sequence[Run], field: str, *, id: str, title: str, note: str) -> Panel | None:  # noqa: A002
    run = next((run for run in runs if run.by_name.get(field)), None)
    if run is None:
        return None
    names = list(run.by_name[field])
    table = cells(run, field)
    return Panel(
        id=id,
        title=title + (f", {run.name}" if len(runs) > 1 else ""),
        note=note,
        size="half",
        height=min(420, max(90, (16 if len(names) <= 24 else 7) * len(names))),
        chart=heat_chart("", names),
        tables={"cells": table},
    )

"""What the page is given: for each run its thinned columns, facts and findings, as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..run import Floats, Run
from ..verdict import Judgement
from .panel import Panel
from .tables import SMOOTHED, TABLE, smooth
from .thinning import kept_rows

__all__ = ["drawn", "numbers", "panel_data", "run_data"]

# Updates of all runs together, beside skipped ones. With a dozen columns of about six characters
# they are less than 2 MB, and more points than the widest screen has pixels for one panel.
BUDGET = 16_000
_SKIPPED = 10_000  # of the same: more are thinned as the others are; the strip draws them all
_DIGITS = 6

# In the order in which the record of an update is shown.
_SHOWN = (
    "update", "step", "loss_mean", "grad_norm", "threshold", "coefficient", "clipped", "lr",
    "loss_scale", "targets", "num_microbatches", "num_nonfinite", "seconds", "targets_per_second",
    "update_norm", "naive_update_norm", "noise_scale", "grad_largest", "grad_zeros",
    "outlier_microbatch", "microbatch_spread", "memory_bytes",
)  # fmt: skip
_MOST_COLUMNS = 32


def drawn(run: Run) -> dict[str, Floats]:
    """Every column that can be drawn or shown, in the order of a record.

    Args:
        run: The run.
    """
    derived = {
        "threshold": run.threshold,
        "coefficient": run.coefficient,
        "clipped": run.clipped,
        "targets_per_second": run.targets_per_second,
    }
    found = {**run.columns, **derived}
    names = [name for name in _SHOWN if name in found]
    names += [name for name in found if name not in names and name not in _HIDDEN]
    return {
        name: found[name]
        for name in names[:_MOST_COLUMNS]
        if bool(np.isfinite(found[name]).any()) or name == "update"
    }


_HIDDEN = {"clip_coefficient", "clip_max_norm", "noise_scale_low", "noise_scale_high"}
_EXTREMES = (
    "loss_mean", "grad_norm", "coefficient", "lr", "loss_scale", "targets", "seconds",
    "update_norm", "noise_scale", "memory_bytes",
)  # fmt: skip


def run_data(run: Run, judgement: Judgement, *, budget: int) -> dict[str, Any]:
    """Give a run as plain values, thinned.

    Args:
        run: The run.
        judgement: Its verdict.
        budget: About how many updates to keep.
    """
    columns = drawn(run)
    skipped = ~run.applied
    must = skipped if int(skipped.sum()) <= _SKIPPED else np.zeros(len(run), dtype=bool)
    extremes = [columns[name] for name in _EXTREMES if name in columns]
    rows = kept_rows(extremes, must, budget)
    for name in SMOOTHED:
        if name in columns:
            columns[name + TABLE] = smooth(columns[name], log=name == "grad_norm")
    return {
        "name": run.name,
        "path": str(run.path),
        "kind": run.kind,
        "updates": len(run),
        "first": float(run.updates[0]),
        "last": float(run.updates[-1]),
        "kept": len(rows),
        "running": run.is_running,
        "names": dict(run.names),
        "verdicts": [run.verdicts[row] for row in rows],
        "columns": {name: numbers(values[rows]) for name, values in columns.items()},
        "headline": judgement.headline,
        "facts": dict(judgement.facts),
        "findings": [finding.to_json() for finding in judgement.findings],
        "not_judged": dict(judgement.not_judged),
    }


def panel_data(panel: Panel, spec: dict[str, Any]) -> dict[str, Any]:
    """Give a panel as plain values.

    Args:
        panel: The panel.
        spec: Its chart.
    """
    return {
        "id": panel.id,
        "title": panel.title,
        "size": panel.size,
        "height": panel.height,
        "log": panel.log,
        "groups": list(panel.groups),
        "spec": spec,
        "lines": [
            [line.run, line.column, line.group, line.dashed, line.opacity, line.width]
            for line in panel.lines
        ],
        "tables": {
            name: {
                column: numbers(np.array(values))
                if values and isinstance(values[0], float)
                else values
                for column, values in table.items()
            }
            for name, table in panel.tables.items()
        },
    }


def numbers(values: Floats) -> list[Any]:
    """Round to six digits; None for nan, since JSON has no name for it, and for infinity.

    Example:
        >>> numbers(np.array([1.0, 0.123456789, np.nan]))
        [1, 0.123457, None]
    """
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def share_of_budget(runs: Sequence[Run]) -> int:
    """How many updates of each run are kept."""
    return max(1000, BUDGET // len(runs))

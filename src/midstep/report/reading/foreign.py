"""Logs of others: rows of names and numbers, brought into the columns of a run.

A log may put what belongs to one step into several rows, as Lightning's does, and may go back after
a restart: rows of one step are one update, and the later value counts.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..run import APPLIED, Floats, Run, Samples
from .columns import Columns, number_of
from .errors import ReportError
from .events import scalars
from .folder import json_lines
from .guess import named

__all__ = ["read_csv", "read_events", "read_json_lines", "read_trainer_state", "run_of"]

Rows = Iterable[Mapping[str, float]]
_STEPS = ("global_step", "step", "update", "iteration", "Step", "_step")


def read_csv(path: Path) -> Iterator[dict[str, float]]:
    """Read a table with a line of names; commas, semicolons or tabs between.

    Args:
        path: The file.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        head = file.readline()
        file.seek(0)
        delimiter = max(",;\t", key=head.count)
        for row in csv.DictReader(file, delimiter=delimiter):
            yield _numbers({str(name).strip(): value for name, value in row.items()})


def read_json_lines(path: Path) -> Iterator[dict[str, float]]:
    """Read a JSON object a line; objects within become `outer/inner`.

    Args:
        path: The file.
    """
    for _, values in json_lines(path):
        yield _numbers(_flat(values))


def read_trainer_state(path: Path) -> Iterator[dict[str, float]]:
    """Read what the trainer of Transformers logged: `log_history` of `trainer_state.json`.

    Args:
        path: The file.

    Raises:
        ReportError: It is not such a file.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"`{path}` is not JSON: {error}.") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ReportError(
            f"`{path}` has no `log_history`, so it is not the `trainer_state.json` of a "
            "Transformers trainer."
        )
    # The last row sums the run up under names such as `train_loss`: it is no update.
    return (_numbers(row) for row in history if "train_runtime" not in row)


def read_events(paths: Iterable[Path]) -> Iterator[dict[str, float]]:
    """Read the scalars of TensorBoard event files; each is a row of step and tag.

    Args:
        paths: Files of one run, in the order they were begun.
    """
    for path in paths:
        for scalar in scalars(path):
            yield {"step": scalar.step, scalar.tag: scalar.value}


def run_of(
    rows: Rows,
    *,
    name: str,
    path: Path,
    kind: str,
    chosen: Mapping[str, str],
    max_norm: float | None,
) -> Run:
    """Make a run of rows.

    Args:
        rows: Names and numbers.
        name: What the run is called.
        path: Where they were read.
        kind: What wrote them.
        chosen: Names of columns that the user gave.
        max_norm: The clip threshold that the user gave.

    Raises:
        ReportError: Neither a loss nor a norm is found.
    """
    step = chosen.get("update")
    merged = _merged(rows, _STEPS if step is None else (step,))
    columns, names = named(merged, chosen, str(path))
    if "loss_mean" not in columns and "grad_norm" not in columns:
        raise ReportError(
            f"`{path}`: no column looks like a loss or a gradient norm. Name them, as in `--column "
            f"loss_mean=NAME --column grad_norm=NAME`; it has {', '.join(sorted(merged)[:20])}."
        )
    if "update" not in columns:
        columns["update"] = np.arange(1.0, len(next(iter(columns.values()))) + 1)
    held_out = columns.pop("held_out", None)
    kept = ~np.isnan(columns["update"])
    samples = None if held_out is None else _samples(columns["update"], held_out)
    # A row that only holds a held-out loss, or an epoch's mean, is no update.
    said = [columns[field] for field in columns if field != "update"]
    kept &= ~np.all(np.isnan(said), axis=0)
    columns = {field: values[kept] for field, values in columns.items()}
    return Run(
        name=name,
        path=path,
        kind=kind,
        columns=columns,
        verdicts=(APPLIED,) * int(kept.sum()),
        held_out=samples,
        max_norm=max_norm,
        names=names,
    )


def _merged(rows: Rows, steps: tuple[str, ...]) -> dict[str, Floats]:
    """Join the rows of each step, and put the steps in order."""
    by_step: dict[float, dict[str, float]] = {}
    for number, row in enumerate(rows, start=1):
        step = next((row[name] for name in steps if name in row), float(number))
        by_step.setdefault(step, {}).update(row)
    if not by_step:
        return {}
    columns = Columns()
    for step in sorted(by_step):
        columns.add(by_step[step])
    return columns.arrays()


def _samples(updates: Floats, values: Floats) -> Samples | None:
    found = ~np.isnan(values)
    return Samples(updates[found], values[found]) if found.any() else None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    pairs = ((name, number_of(value)) for name, value in values.items())
    return {name: number for name, number in pairs if number is not None}


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}/")
        else:
            flat[before + name] = value
    return flat

"""The folder or file that midstep wrote: `updates.jsonl`, with what stands beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..run import Floats, Run, Samples
from .columns import Columns, Table, number_of
from .errors import ReportError

__all__ = ["is_record", "json_lines", "read_folder"]

_OURS = {"update", "verdict", "denominators", "loss_means"}
_STAGES = ("data", "forward", "backward", "measure", "step")
# Lists and maps that are folded into numbers, or are too wide to keep.
_SPECIAL = {"lr", "decay_exponent", "denominators", "loss_means", "moments", "stage_seconds"}


def is_record(values: Mapping[str, Any]) -> bool:
    """Whether a line of JSON is a record of midstep."""
    return values.keys() >= _OURS


def read_folder(path: Path, name: str) -> Run:
    """Read `updates.jsonl`, and `held_out.jsonl` and `run.json` where they are.

    Memory: 8 bytes for each number that was recorded, and one line.

    Args:
        path: The file of records.
        name: What the run is called.

    Raises:
        ReportError: A line other than the last is no record.
    """
    columns, tables, verdicts = Columns(), dict[str, Table](), list[str]()
    for number, values in json_lines(path):
        if not is_record(values):
            raise ReportError(
                f"`{path}`: line {number} is no record of an update. A line may be torn only at "
                "the end; restore the file, or cut the line out."
            )
        _add(values, columns, tables)
        verdicts.append(str(values["verdict"]))
    arrays = columns.arrays()
    updates = arrays.get("update", np.zeros(0))
    return Run(
        name=name,
        path=path,
        kind="records of midstep",
        columns=arrays or {"update": updates},
        verdicts=tuple(verdicts),
        by_name={field: table.samples(updates) for field, table in tables.items()},
        held_out=_held_out(path.with_name("held_out.jsonl")),
        about=_about(path.with_name("run.json")),
        is_norm_true=True,
        is_running=_is_held(path.with_name("run.json")),
    )


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of JSON lines one by one, with their numbers from 1.

    A last line that was cut short, because its writer was killed or is writing, is left out.

    Args:
        path: The file.

    Raises:
        ReportError: A line before the last is not JSON.
    """
    torn: tuple[int, str] | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise ReportError(
                    f"`{path}`: line {torn[0]} is not JSON (`{torn[1][:40].strip()}`). A line may "
                    "be torn only at the end; restore the file, or cut the line out."
                )
            if line.isspace():
                continue
            try:
                values = json.loads(line)
            except ValueError:
                torn = number, line
                continue
            if isinstance(values, dict):
                yield number, values


def _add(values: Mapping[str, Any], columns: Columns, tables: dict[str, Table]) -> None:
    row: dict[str, float] = {}
    for key, value in values.items():
        if type(value) is float or type(value) is int or type(value) is bool:  # the usual case
            row[key] = value
        elif type(value) is dict and key not in _SPECIAL:
            tables.setdefault(key, Table()).add(columns.length, _numbers(value))
        elif type(value) is str and (number := number_of(value)) is not None:
            row[key] = number
    row |= _by_group(values)
    for name in ("denominators", "loss_means"):
        terms = _numbers(values.get(name) or {})
        if len(terms) > 1:
            tables.setdefault(name, Table()).add(columns.length, terms)
        if name == "denominators" and terms:
            row["targets"] = next(iter(terms.values()))
    stages = values.get("stage_seconds")
    if isinstance(stages, dict):
        row.update({f"stage_{k}": v for k, v in _numbers(stages).items() if k in _STAGES})
    microbatches = _list(values.get("microbatch_grad_norms"))
    if len(microbatches) > 1:
        # One number each instead of a ragged list: how far the longest stands out.
        middle = sorted(microbatches)[len(microbatches) // 2]
        row["microbatch_spread"] = max(microbatches) / middle if middle else float("nan")
    columns.add(row)


def _by_group(values: Mapping[str, Any]) -> dict[str, float]:
    """Give one column a parameter group; the first has the plain name."""
    numbers = (
        (name if group == 0 else f"{name}.{group}", number_of(value))
        for name in ("lr", "decay_exponent")
        for group, value in enumerate(values.get(name, ()))
    )
    return {name: number for name, number in numbers if number is not None}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    pairs = ((name, number_of(value)) for name, value in values.items())
    return {name: number for name, number in pairs if number is not None}


def _list(values: object) -> list[float]:
    if not isinstance(values, list):
        return []
    return [number for value in values if (number := number_of(value)) is not None]


def _held_out(path: Path) -> Samples | None:
    if not path.is_file():
        return None
    rows = [values for _, values in json_lines(path)]
    pairs = [(number_of(row.get("update")), number_of(row.get("loss_mean"))) for row in rows]
    found = [(update, loss) for update, loss in pairs if update is not None and loss is not None]
    if not found:
        return None
    both: Floats = np.array(found, dtype=np.float64)
    return Samples(both[:, 0], both[:, 1])


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and about.get("format") == "midstep run" else {}


def _is_held(path: Path) -> bool:
    """Whether a process holds the folder, as one that trains does for as long as it lives."""
    try:
        import fcntl

        with path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # Windows, no such file, or a file system without locks
        return False
    return False

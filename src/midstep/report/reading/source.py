"""Which reader reads a path: decided by what is there, never by trying one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..run import Run
from .errors import ReportError
from .folder import is_record, read_folder
from .foreign import read_csv, read_events, read_json_lines, read_trainer_state, run_of

__all__ = ["ReportError", "read"]

_READS = (
    "a run of `midstep train`, a CSV file, JSON lines, event files of TensorBoard, or the "
    "`trainer_state.json` of Transformers"
)


def read(
    path: Path,
    *,
    name: str | None = None,
    columns: Mapping[str, str] | None = None,
    max_norm: float | None = None,
) -> Run:
    r"""Read a run, whoever recorded it.

    Args:
        path: A folder of a run, or the file of its log.
        name: What to call it; the name of its folder or file by default.
        columns: For a foreign log, names of its columns by the names they have in a run, where
            guessing by name would be wrong.
        max_norm: The clip threshold, for a log that does not hold it.

    Raises:
        ReportError: Nothing that can be read is there, or no column looks like a loss or a norm.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder) / "log.csv"
        ...     _ = log.write_text("step,train/loss,train/grad_norm\n1,2.5,0.7\n2,2.0,0.5\n")
        ...     run = read(log)
        >>> run.names["grad_norm"], run.column("grad_norm").tolist()
        ('train/grad_norm', [0.7, 0.5])
    """
    found = _file_of(path)
    name = name or (path.resolve().name if path.is_dir() else _stem(path))
    chosen = dict(columns or {})
    if found.suffix in (".jsonl", ".ndjson", ".json") and _first_is_record(found):
        if chosen:
            raise ReportError(
                f"`--column` with `{path}`: these are records of midstep, whose names are known. "
                "Leave it out."
            )
        run = read_folder(found, name)
    else:
        rows, kind = _rows(found)
        run = run_of(rows, name=name, path=path, kind=kind, chosen=chosen, max_norm=max_norm)
    if len(run) == 0:
        raise ReportError(f"`{path}` holds no update yet, so there is nothing to show.")
    return run


def _rows(path: Path) -> tuple[Iterator[dict[str, float]], str]:
    if ".tfevents." in path.name:
        files = sorted(path.parent.glob("*.tfevents.*"), key=lambda file: file.name)
        return read_events(files), "event files of TensorBoard"
    if path.suffix in (".csv", ".tsv"):
        is_lightnings = path.name == "metrics.csv"
        return read_csv(path), "a CSV file of Lightning" if is_lightnings else "a CSV file"
    if path.suffix in (".jsonl", ".ndjson") or (path.suffix == ".json" and _is_lines(path)):
        return read_json_lines(path), "JSON lines"
    if path.suffix == ".json":
        return read_trainer_state(path), "the state of a Transformers trainer"
    raise ReportError(f"`{path}` is not a log that can be read: {_READS}.")


def _file_of(path: Path) -> Path:
    """Find the log in a folder: midstep's own, then Transformers', Lightning's, TensorBoard's."""
    if path.is_file():
        return path
    if not path.exists():
        raise ReportError(f"`{path}` does not exist. Pass {_READS}.")
    if (own := path / "updates.jsonl").is_file():
        return own
    states = [*path.glob("trainer_state.json"), *path.glob("checkpoint-*/trainer_state.json")]
    if states:
        return max(states, key=lambda state: (state.stat().st_mtime_ns, str(state)))
    for pattern in ("metrics.csv", "*.tfevents.*", "*.csv", "*.jsonl"):
        found = sorted(path.glob(pattern))
        if len(found) == 1 or (found and pattern == "*.tfevents.*"):
            return found[0]
        if found:
            names = ", ".join(f"`{file.name}`" for file in found[:5])
            raise ReportError(f"`{path}` holds several logs ({names}). Pass one of them.")
    raise ReportError(f"`{path}` holds no log that can be read: {_READS}.")


def _first_line(path: Path) -> object:
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            return json.loads(file.readline())
        except ValueError:
            return None


def _first_is_record(path: Path) -> bool:
    if path.name == "updates.jsonl":
        return True
    first = _first_line(path)
    return isinstance(first, dict) and is_record(first)


def _is_lines(path: Path) -> bool:
    first = _first_line(path)
    return isinstance(first, dict) and "log_history" not in first


def _stem(path: Path) -> str:
    if path.name in ("updates.jsonl", "metrics.csv", "trainer_state.json"):
        return path.resolve().parent.name
    return path.stem

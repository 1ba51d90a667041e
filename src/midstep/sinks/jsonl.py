"""JSON lines: the log that every run has, whole lines whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ..records import UpdateRecord

__all__ = ["JsonLines"]


class JsonLines:
    """Write each record as one line of JSON, as it happens.

    A line is written whole by one system call, so a killed run keeps every complete line. Opening a
    file that has lines goes on after them; a last line that a crash cut short is removed.

    Args:
        path: The file, usually `updates.jsonl`; its folder is made.

    Raises:
        OSError: The folder or the file cannot be written.

    Example:
        >>> import midstep as ms, tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with JsonLines(Path(folder) / "updates.jsonl") as sink:
        ...         updater = ms.Updater(
        ...             model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters()),
        ...             sinks=[sink])
        ...         record = updater.update(
        ...             [torch.ones(2, 1)], lambda m, x: m(x).sum(), count=ms.rows())
        ...     lines = sink.path.read_text().splitlines()
        >>> UpdateRecord.from_json(lines[0]) == record
        True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file: IO[bytes] = self.path.open("ab", buffering=0)

    def __call__(self, record: UpdateRecord) -> None:
        """Append one record, whole or not at all.

        Raises:
            OSError: The disk is full. What was written of the line is taken back.
        """
        line = record.to_json().encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(self.path.stat().st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def rewind(self, update: int) -> None:
        """Drop the records after an update, which a resumed run is about to make again.

        Args:
            update: The last update to keep.
        """
        self._file.close()
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if UpdateRecord.from_json(line).update <= update]
        if len(kept) < len(lines):
            part = self.path.with_suffix(".part")
            part.write_text("".join(kept), encoding="utf-8")
            part.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)

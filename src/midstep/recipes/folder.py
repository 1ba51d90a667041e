"""The folder of a run: what is in it, and that nothing in it is lost.

    run.json        recipe, settings, versions: how the run was begun; written once
    updates.jsonl   one record an update
    held_out.jsonl  one line a held-out loss
    checkpoint.pt   the last checkpoint, whole at any moment; of many ranks a folder

A folder belongs to one run, and to one process at a time: of many ranks, to the first. A run that
goes on is rewound to its checkpoint: records of updates that are about to be made again are
dropped.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .. import __version__
from ..checkpoint.replacing import discard, part_of
from ..errors import CheckpointError
from ..records import UpdateRecord
from ..sinks import JsonLines
from .held_out import HeldOut

__all__ = ["Followed", "RunFolder", "new_path", "read_about", "versions"]

_FORMAT = "midstep run"
_SCHEMA = 1
_FILES = ("run.json", "updates.jsonl", "held_out.jsonl", "checkpoint.pt")


class RunFolder:
    """One run on disk. Made by `create` or `open`; a context that lets go of the folder.

    Attributes:
        path: The folder.
        about: What `run.json` says: how the run was begun.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, is_new: bool) -> None:
        self.path = path
        self.about = about
        self._is_new = is_new
        self._lock = _locked(path)
        self._updates: JsonLines | None = None

    @classmethod
    def create(cls, path: Path, about: Mapping[str, Any]) -> RunFolder:
        """Begin a run in a new folder, or in one that holds none.

        Args:
            path: The folder; it and its parents are made.
            about: How the run is begun: plain values.

        Raises:
            FileExistsError: The folder holds a run.
            OSError: It cannot be written.
        """
        path.mkdir(parents=True, exist_ok=True)
        taken = [name for name in _FILES if (path / name).exists()]
        if taken:
            raise FileExistsError(
                f"`{path}` holds a run already (`{taken[0]}`), and a run is never overwritten. Go "
                "on with it by `--resume`, or choose another folder by `--out`."
            )
        about = {"format": _FORMAT, "schema": _SCHEMA, **about}
        with (path / "run.json").open("x", encoding="utf-8") as file:  # x: one of two processes
            file.write(json.dumps(about, indent=2, allow_nan=False) + "\n")
        return cls(path, about, is_new=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Go on with a run.

        Args:
            path: Its folder.

        Raises:
            CheckpointError: The folder holds no run, or one that this version cannot read.
        """
        return cls(path, read_about(path), is_new=False)

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint is."""
        return self.path / "checkpoint.pt"

    def rewind(self, *, update: int, step: int) -> None:
        """Drop what was recorded after a checkpoint.

        Args:
            update: Attempted updates of the checkpoint.
            step: Applied updates of the checkpoint.

        Raises:
            CheckpointError: Records of updates before the checkpoint are missing or unreadable.
        """
        updates = self._open_updates()
        try:
            updates.rewind(update)
            found = sum(1 for _ in self.records())
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"`{updates.path}` holds a line that is no record ({error}), so the run cannot be "
                "taken back to its checkpoint. Restore the file, or begin another run."
            ) from error
        if found != update:
            raise CheckpointError(
                f"`{updates.path}` holds {found} records, and the checkpoint was saved after "
                f"{update} updates: records are missing. Restore the file, or begin another run."
            )
        _rewrite(self.path / "held_out.jsonl", lambda line: HeldOut.from_json(line).step <= step)

    def add_record(self, record: UpdateRecord) -> None:
        """Append the record of an update, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        self._open_updates()(record)

    def add_held_out(self, held_out: HeldOut) -> None:
        """Append a held-out loss.

        Raises:
            OSError: It cannot be written.
        """
        with (self.path / "held_out.jsonl").open("a", encoding="utf-8") as file:
            file.write(held_out.to_json() + "\n")

    def records(self) -> Iterator[UpdateRecord]:
        """Read every record."""
        return (UpdateRecord.from_json(line) for line in _lines(self.path / "updates.jsonl"))

    def held_out(self) -> Iterator[HeldOut]:
        """Read every held-out loss."""
        return (HeldOut.from_json(line) for line in _lines(self.path / "held_out.jsonl"))

    def sync(self) -> None:
        """Have every record on disk before the checkpoint that comes after it."""
        for name in ("updates.jsonl", "held_out.jsonl"):
            with contextlib.suppress(FileNotFoundError), (self.path / name).open("rb") as file:
                os.fsync(file.fileno())

    def discard_if_empty(self) -> bool:
        """Remove a run that was begun here and made no update, so that it is in nobody's way.

        Returns:
            Whether it was removed.
        """
        if not self._is_new or next(self.records(), None) is not None:
            return False
        checkpoint = self.path / "checkpoint.pt"  # a folder, where several ranks wrote it
        for path in (part_of(checkpoint), *(self.path / name for name in _FILES)):
            discard(path)
        with contextlib.suppress(OSError):  # something else is in the folder
            self.path.rmdir()
        return True

    def close(self) -> None:
        """Close the files and let go of the folder."""
        if self._updates is not None:
            self._updates.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_updates(self) -> JsonLines:
        if self._updates is None:
            self._updates = JsonLines(self.path / "updates.jsonl")
        return self._updates


class Followed(RunFolder):
    """A run on disk as all ranks but the first have it: they know where it is and write nothing.

    Checkpoints are written by all ranks, and are no affair of the folder.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = about

    def rewind(self, *, update: int, step: int) -> None:
        """Leave it to the first rank."""

    def add_record(self, record: UpdateRecord) -> None:
        """Leave it to the first rank."""

    def add_held_out(self, held_out: HeldOut) -> None:
        """Leave it to the first rank."""

    def sync(self) -> None:
        """Leave it to the first rank."""

    def discard_if_empty(self) -> bool:
        """Leave it to the first rank."""
        return False

    def close(self) -> None:
        """Nothing is open."""


def new_path(parent: Path, stem: str) -> Path:
    """Find the first folder `stem-1`, `stem-2`, ... that does not exist.

    Args:
        parent: Where to look.
        stem: What the name begins with.
    """
    number = 1
    while (path := parent / f"{stem}-{number}").exists():
        number += 1
    return path


def versions() -> dict[str, str]:
    """Name the versions that a run's numbers depend on."""
    return {
        "midstep": __version__,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "numpy": importlib.metadata.version("numpy"),
    }


def read_about(path: Path) -> dict[str, Any]:
    """Read how a run was begun.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: The folder holds no run, or one that this version cannot read.
    """
    try:
        about = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"`{path}` holds no run: there is no `run.json` in it. Pass the folder that "
            "`midstep train` wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{path / 'run.json'}` cannot be read: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise CheckpointError(f"`{path / 'run.json'}` does not describe a run of midstep.")
    if about.get("schema") != _SCHEMA:
        raise CheckpointError(
            f"`{path / 'run.json'}` has schema {about.get('schema')}, this version of midstep "
            f"reads {_SCHEMA}. Go on with the version that began the run."
        )
    return about


def _locked(path: Path) -> IO[bytes]:
    """Hold the folder for this process; the system lets go of it however the process ends."""
    handle = (path / "run.json").open("rb")
    try:
        import fcntl
    except ImportError:  # Windows
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise CheckpointError(
            f"`{path}` is in use by another process that trains the same run; two would mix their "
            "records. Wait for it or stop it first."
        ) from None
    except OSError:  # a file system without locks
        pass
    return handle


def _lines(path: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        # A crash may have cut the last line short.
        yield from (line for line in file if line.endswith("\n"))


def _rewrite(path: Path, keeps: Callable[[str], bool]) -> None:
    if path.exists():
        kept = [line for line in _lines(path) if keeps(line)]
        part = path.with_suffix(".part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)

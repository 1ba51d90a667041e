"""Replacing: the new checkpoint takes the place of the old one, and one of them is always whole.

A file replaces a file at one stroke. A folder cannot, so that a kill at the wrong moment leaves
nothing at `path` and the old one beside it; `whole_at` and `settle` know where to look.

    path.part       being written; a folder holds `.metadata` once all else in it is on disk
    path.part.old   the one before, until the new one stands
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

__all__ = [
    "discard",
    "is_folder",
    "name_of",
    "part_of",
    "replace",
    "settle",
    "sync_folder",
    "whole_at",
]


def part_of(path: Path) -> Path:
    """Where the next checkpoint is written."""
    return path.with_name(path.name + ".part")


def _old_of(path: Path) -> Path:
    return path.with_name(path.name + ".part.old")


def is_folder(path: Path) -> bool:
    """Whether this is a whole checkpoint of many ranks."""
    return (path / ".metadata").is_file() and (path / name_of(0)).is_file()


def name_of(rank: int) -> str:
    """What the file of one rank is called in its folder."""
    return f"rank-{rank}.pt"


def whole_at(path: Path) -> Path | None:
    """Find the newest whole checkpoint of this path; None if there is none."""
    if path.exists():
        return path
    part, old = part_of(path), _old_of(path)
    if is_folder(part):
        return part
    return old if old.is_file() or is_folder(old) else None


def settle(path: Path) -> None:
    """End a replacement that was broken off, and clear away what it left.

    Raises:
        FileExistsError: A folder is in the way that is no checkpoint.
    """
    whole = whole_at(path)
    if whole is not None and whole != path:
        whole.rename(path)
        sync_folder(path.parent)
    if path.is_dir() and not is_folder(path):
        raise FileExistsError("a folder is there that is no checkpoint")
    discard(part_of(path))
    discard(_old_of(path))


def replace(path: Path) -> None:
    """Put what was written in the place of what was there."""
    part, old = part_of(path), _old_of(path)
    if path.is_dir() or (part.is_dir() and path.exists()):
        path.rename(old)
        sync_folder(path.parent)
    part.replace(path)
    sync_folder(path.parent)
    with contextlib.suppress(OSError):  # the new one stands; the next save clears this away
        discard(old)


def discard(path: Path) -> None:
    """Remove a file or folder, which at no moment looks whole without being so."""
    if path.is_dir():
        (path / ".metadata").unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk; else a rename could be lost with the power."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

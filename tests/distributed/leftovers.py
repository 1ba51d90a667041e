"""What a save that was broken off may leave on disk, made out of real checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from distributed.jobs import NAME, Job
from distributed.processes import run

import midstep as ms


def saved_at(folder: Path, step: int, *, many: bool) -> Path:
    """A checkpoint after so many steps, by one rank or by two."""
    path = folder / f"{step}"
    job = Job("plain")
    job.train(step - many)
    ms.save(path, job.updater)
    if many:
        run(one_more, str(path), size=2)
    return path


def one_more(rank: int, size: int, path: str) -> None:
    del rank, size
    job = Job("DDP")
    ms.load(path, job.updater)
    job.train(job.step + 1)
    ms.save(path, job.updater)


def checkpoints_in(folder: Path) -> dict[str, Path]:
    return {
        "file 1": saved_at(folder, 1, many=False),
        "folder 2": saved_at(folder, 2, many=True),
        "folder 3": saved_at(folder, 3, many=True),
    }


def put(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


# What lies at the path, beside it as being written, and beside it as replaced; and what is loaded.
STATES: dict[str, tuple[str, str, str, int | None]] = {
    "the old one, the new one unfinished": ("folder 2", "half", "", 2),
    "the old one, the new one not yet put there": ("folder 2", "folder 3", "", 2),
    "the old one put aside, the new one whole": ("", "folder 3", "folder 2", 3),
    "the old file put aside, the new one whole": ("", "folder 3", "file 1", 3),
    "the old one put aside for a file": ("", "file 1", "folder 2", 2),
    "the new one, the old one not cleared away": ("folder 3", "", "folder 2", 3),
    "the first one, not yet put there": ("", "folder 3", "", 3),
    "the first one, unfinished": ("", "half", "", None),
    "half a file": ("", "half a file", "", None),
}


def lay(name: str, checkpoints: dict[str, Path], folder: Path) -> Path:
    """Make a folder look as an interrupted save left it."""
    path = folder / NAME
    folder.mkdir(exist_ok=True)
    for what, suffix in zip(STATES[name][:3], ("", ".part", ".part.old"), strict=True):
        target = path.with_name(path.name + suffix)
        if what == "half":
            put(checkpoints["folder 3"], target)
            (target / ".metadata").unlink()
        elif what == "half a file":
            target.write_bytes(checkpoints["file 1"].read_bytes()[:-100])
        elif what:
            put(checkpoints[what], target)
    return path

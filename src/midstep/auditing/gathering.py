"""Gathering: recordings of all processes of a run, brought to one of them by file.

No collective is added: a rank writes its recording into a folder when it ends, and the first local
rank reads them. Processes that the script starts itself (`multiprocessing`) are watched as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .events import Recording

__all__ = ["Folder", "watch_children"]

PATIENCE_SECONDS = 60.0  # for ranks that end later
LOOK_SECONDS = 0.05


class Folder:
    """Where the processes of one run leave their recordings, and which of them this one is.

    Under torchrun the local ranks share one folder, named after the launch; only its owner can
    read it, because a recording is a pickle.

    Raises:
        PermissionError: The folder belongs to somebody else.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        launch = os.environ.get("TORCHELASTIC_RUN_ID")
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if launch else 0
        self.num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launch else 1
        if launch is None:
            self.path = Path(tempfile.mkdtemp(prefix="midstep-audit-"))
        else:
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"midstep-audit-{os.getuid()}-{launch}-{os.getppid()}-{restart}"
            self.path = Path(tempfile.gettempdir()) / name.replace(os.sep, "_")
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self.path.stat().st_uid != os.getuid():
                raise PermissionError(f"`{self.path}` belongs to another user: remove it")
        (self.path / f"{self.local_rank}.pid").write_text(str(os.getpid()))

    @property
    def is_copy(self) -> bool:
        """Whether this process was forked from the one that made it."""
        return os.getpid() != self._owner

    @property
    def reports(self) -> bool:
        """Whether this process reports for all."""
        return self.local_rank == 0

    def write(self, recording: Recording, name: str) -> None:
        """Leave a recording.

        Args:
            recording: Of this process.
            name: Of the file; the same name is written over.
        """
        write_recording(self.path, recording, name)

    def read(self) -> list[Recording]:
        """Wait for the other local ranks, then read all recordings and remove the folder.

        A rank that is gone without leaving any is not waited for.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        for rank in range(1, self.num_local):
            while not (self.path / f"rank{rank}.events").exists():
                if time.monotonic() > deadline or self._is_gone(rank):
                    break
                time.sleep(LOOK_SECONDS)
        recordings = [
            pickle.loads(path.read_bytes()) for path in sorted(self.path.glob("*.events"))
        ]
        shutil.rmtree(self.path, ignore_errors=True)
        return recordings

    def _is_gone(self, rank: int) -> bool:
        marker = self.path / f"{rank}.pid"
        if not marker.exists():
            return False
        try:
            os.kill(int(marker.read_text()), 0)
        except (ProcessLookupError, ValueError):
            return not (self.path / f"rank{rank}.events").exists()
        return False


def write_recording(folder: Path, recording: Recording, name: str) -> None:
    """Write a recording so that it is there as a whole or not at all.

    Args:
        folder: Where to.
        recording: What was written down.
        name: Of the file.
    """
    if folder.exists():
        part = folder / f"{name}.part"
        part.write_bytes(pickle.dumps(recording))
        part.rename(folder / f"{name}.events")


class _Watched:
    """The target of a process that is started afresh: it watches there, too."""

    def __init__(self, target: Callable[..., Any], folder: Path, own: tuple[str, ...]) -> None:
        self.target = target
        self.folder = folder
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .recorder.watching import watch

        is_complete = False
        with watch(own=self.own, find_optimizers=False) as recorder:
            try:
                result = self.target(*args, **kwargs)
                is_complete = True
                return result
            finally:
                recording = recorder.recording(is_complete=is_complete)
                write_recording(self.folder, recording, f"child{os.getpid()}")


@contextlib.contextmanager
def watch_children(recorder: Any, folder: Path, own: tuple[str, ...]) -> Iterator[None]:
    """Watch the processes that are started in a `with` block by `multiprocessing`.

    A forked child goes on with the recorder it inherits; one that is started afresh gets its own.
    Workers of a loader are left alone.

    Args:
        recorder: Of this process.
        folder: Where they leave their recordings.
        own: Folders that are the user's.
    """
    parent = os.getpid()

    def flush() -> None:
        recording = recorder.recording(is_complete=True)
        if recording.events:
            write_recording(folder, recording, f"child{os.getpid()}")

    known = weakref.ref(recorder)

    def after_any_fork() -> None:
        inherited = known()
        if inherited is not None and inherited.is_watching:
            inherited.begin_anew()

    def after_fork(_: object) -> None:
        if os.getpid() != parent and recorder.is_watching:
            multiprocessing.util.Finalize(None, flush, exitpriority=100)

    start = multiprocessing.process.BaseProcess.start

    def watching_start(self: Any) -> None:
        is_fresh = getattr(self, "_start_method", None) in {"spawn", "forkserver"}
        if is_fresh and recorder.is_watching and not self.daemon and self._target is not None:
            self._target = _Watched(self._target, folder, own)
        start(self)

    os.register_at_fork(after_in_child=after_any_fork)  # for good, so it holds nothing
    multiprocessing.util.register_after_fork(recorder, after_fork)
    multiprocessing.process.BaseProcess.start = watching_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]

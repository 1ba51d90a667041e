"""The world: how one rank talks to the others, and how it learns that one of them has failed.

Numbers travel in one small collective at a time. A failure cannot travel so, because whoever failed
no longer takes part; it goes by the store that started the group, where every rank looks twice a
second.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RankFailure

__all__ = ["World"]

_POLL_SECONDS = 0.5
_ACKNOWLEDGE_SECONDS = 3.0
_STUCK_SECONDS = 15.0


class World:
    """All ranks that train together, seen from one of them.

    Attributes:
        rank: This rank.
        size: How many there are.
        num_collectives: How many collectives this object has run, for those who count.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.num_collectives = 0
        backend = dist.get_backend()
        self._device = torch.device("cpu")
        if "gloo" not in backend and "mpi" not in backend:
            self._device = torch.device(torch.accelerator.current_accelerator() or "cpu")
        self.board = _Board(self.rank, self.size) if self.size > 1 else None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up each number over all ranks, in float64. One all-reduce of 8 bytes a number."""
        if self.size == 1:
            return list(values)
        self.num_collectives += 1
        buffer = torch.tensor(values, dtype=torch.float64, device=self._device)
        with self.translated():
            dist.all_reduce(buffer)
        found: list[float] = buffer.tolist()
        return found

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Give every rank's numbers, by rank. One all-gather of 8 bytes a number and rank."""
        if self.size == 1:
            return [list(values)]
        self.num_collectives += 1
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        with self.translated():
            dist.all_gather(everyone, own)
        rows: list[list[float]] = torch.stack(everyone).tolist()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank's object, by rank; for what happens once, or on the way to an error."""
        if self.size == 1:
            return [value]
        self.num_collectives += 1
        everyone: list[Any] = [None] * self.size
        with self.translated():
            dist.all_gather_object(everyone, value)
        return everyone

    def fail(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one left a window unfinished, and why if it is known."""
        if self.board is None or isinstance(error, RankFailure):
            return
        if error is None:
            self.board.post("it left a window before its step", waits=False)
        else:
            self.board.post(f"{type(error).__name__}: {error}", waits=True)

    def translated(self) -> contextlib.AbstractContextManager[None]:
        """Turn the error of a broken collective into the failure that broke it."""
        return _Translated(self.board)


class _Translated(contextlib.AbstractContextManager[None]):
    def __init__(self, board: _Board | None) -> None:
        self._board = board

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._board is None or not isinstance(error, RuntimeError):
            return
        if isinstance(error, RankFailure):
            return
        failure = self._board.wait_for_failure(_POLL_SECONDS * 2)
        if failure is not None:
            raise failure from error


class _Board:
    """Where ranks post that they failed: the store of the process group, watched by a thread.

    The thread ends with the board, or with the program.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way
        self._store = dist.PrefixStore("midstep", store)  # type: ignore[attr-defined]
        self._failure: RankFailure | None = None
        self._has_failed = threading.Event()
        self._has_posted = False
        self._is_raised = False
        closed = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), closed), name="midstep-board", daemon=True
        )
        weakref.finalize(self, _close, closed, thread)
        thread.start()

    def post(self, message: str, *, waits: bool) -> None:
        """Tell the others; wait for them to hear it before the store goes with this process."""
        self._is_raised = True
        if self._has_posted or self._has_failed.is_set():
            return
        self._has_posted = waits  # an error may follow a dropped window, not the reverse
        with contextlib.suppress(Exception):  # the store may be gone already
            self._store.set("failure", f"{self._rank} {int(waits)} {message}")
            deadline = time.monotonic() + (_ACKNOWLEDGE_SECONDS if waits else 0.0)
            keys = [f"heard/{r}" for r in range(self._size) if r != self._rank]
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.05)

    def wait_for_failure(self, seconds: float) -> RankFailure | None:
        """Give the failure another rank has posted, waiting a little for it to arrive."""
        self._has_failed.wait(seconds)
        self._is_raised = True
        return self._failure

    def look(self) -> bool:
        """Look once for what another rank posted; True when there is nothing more to look for."""
        try:
            if not self._store.check(["failure"]):
                return False
            rank, waits, message = self._store.get("failure").decode().split(" ", 2)
            if int(rank) == self._rank:
                return True
            self._failure = RankFailure(
                f"Rank {rank} failed: {message}. This rank stopped with it, because a window needs "
                "every rank. Weights are as the last applied update left them.",
                rank=int(rank),
            )
            self._has_failed.set()
            self._store.set(f"heard/{self._rank}", "1")
        except Exception:  # noqa: BLE001 - the store went with the process that held it
            return True
        if waits == "1":
            self._leave_when_stuck()
        return True

    def _leave_when_stuck(self) -> None:
        """End a process that waits for ever in a collective that nobody can complete."""
        time.sleep(_STUCK_SECONDS)
        if not self._is_raised:
            print(self._failure, file=sys.stderr, flush=True)  # noqa: T201 - the last words
            os._exit(1)


def _watch(board_of: weakref.ref[_Board], closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        board = board_of()
        if board is None or board.look():
            return
        del board


def _close(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(2 * _POLL_SECONDS)  # a thread inside the store would outlive the interpreter


def largest(rows: Sequence[Sequence[float]]) -> list[float]:
    """Take the largest of each number over all ranks; nan when any is."""
    columns = zip(*rows, strict=True)
    return [math.nan if any(map(math.isnan, column)) else max(column) for column in columns]

"""The board: where a rank posts that it failed, and how the others hear of it.

Whoever failed takes part in no collective any more, so its news goes by the store that started the
process group. A thread of every rank looks there twice a second, because the rank itself may wait
inside a collective that will never end. It ends with the board, or with the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import RankFailure

__all__ = ["Board"]

_POLL_SECONDS = 0.5
_HEARD_SECONDS = 3.0  # a few polls, and what a busy interpreter adds
_STUCK_SECONDS = 15.0


class Board:
    """News between ranks that cannot travel by a collective.

    Args:
        rank: This rank.
        size: How many there are.
        number: Of the board among those of this process group, the same on all ranks.

    Attributes:
        depth: How many calls this rank is inside of that need every rank.
        window: The window this rank is inside of, from 1; 0 between two.
    """

    def __init__(self, rank: int, size: int, number: int) -> None:
        self._rank = rank
        self._size = size
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way
        self._store: Any = dist.PrefixStore(f"midstep/{number}", store)  # type: ignore[attr-defined]
        self.depth = 0
        self.window = 0
        self._failure: RankFailure | None = None
        self._has_failed = threading.Event()
        self._is_told = False  # this rank's own code knows that something failed
        self._left_since: float | None = None
        closed = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), closed), name="midstep-board", daemon=True
        )
        weakref.finalize(self, _close, closed, thread)
        thread.start()

    def post(self, message: str) -> None:
        """Tell the others that this rank failed, and wait until they have heard.

        The store may go with this process. Of several that fail at once the first is believed.
        """
        self._is_told = True
        if self._has_failed.is_set():
            return
        self._failure = _failure(self._rank, message)
        self._has_failed.set()
        with contextlib.suppress(Exception):  # the store may be gone already
            if self._store.add("num failures", 1) > 1:
                return
            self._store.set("failure", f"{self._rank} {message}")
            self._store.set("news", "1")
            self._await_keys("heard", _HEARD_SECONDS)

    def known_failure(self) -> RankFailure | None:
        """Give the failure that ended this run, if there was one."""
        return self._failure

    def explained(self, error: RuntimeError) -> RankFailure | None:
        """Find out why a collective broke: a failure another rank posted, or a rank that is gone.

        Returns:
            None when every rank is there and has nothing to say, so that the error stands for
            itself.
        """
        self._has_failed.wait(2 * _POLL_SECONDS)
        if self._failure is None:
            self._failure = self._roll_call(error)
        self._is_told = True
        return self._failure

    def leave_window(self) -> None:
        """Note that this rank left its window without a step."""
        with contextlib.suppress(Exception):
            self._store.add(f"left/{self.window}", 1)
            self._store.set(f"left/{self.window}/by", str(self._rank))
        self._left = self.window
        self.window = 0

    _left = 0

    def settle(self) -> RankFailure | None:
        """Make sure, after a window was left, that every rank has left it."""
        left, self._left = self._left, 0
        if not left:
            return None
        deadline = time.monotonic() + _STUCK_SECONDS
        while self._store.add(f"left/{left}", 0) < self._size:
            if self._has_failed.is_set() or time.monotonic() > deadline:
                return self._failure or _failure(
                    self._rank, f"it left window {left}, which other ranks went on with"
                )
            time.sleep(0.05)
        return None

    def look(self) -> None:
        """Look once for what others have posted, and answer. Called by the thread."""
        if self._store.check(["news"]):
            if self._store.check(["roll call"]):
                self._store.set(f"here/{self._rank}", "1")
            if not self._has_failed.is_set() and self._store.check(["failure"]):
                rank, message = self._store.get("failure").decode().split(" ", 1)
                self._failure = _failure(int(rank), message)
                self._has_failed.set()
                self._left_since = time.monotonic()
            self._store.set(f"heard/{self._rank}", "1")
        elif self.window and self._store.check([f"left/{self.window}/by"]):
            self._note_left()
        self._leave_when_stuck()

    def _note_left(self) -> None:
        """Another rank left this window: wrong, unless this one is about to do so as well."""
        if self._left_since is None:
            self._left_since = time.monotonic()
        elif time.monotonic() - self._left_since > _STUCK_SECONDS / 2 and self.window:
            rank = int(self._store.get(f"left/{self.window}/by"))
            self._failure = _failure(rank, f"it left window {self.window} before its step")
            self._has_failed.set()

    def _leave_when_stuck(self) -> None:
        """End a process that waits in a collective that nobody can complete.

        The others' connections end with their processes, and with them the wait. It goes on when
        one of them lives on after its error, and gloo cannot be told to stop.
        """
        is_inside = self.depth > 0 or self.window > 0
        if self._is_told or not self._has_failed.is_set() or not is_inside:
            self._left_since = None if self.window == 0 else self._left_since
            return
        if self._left_since is None:
            self._left_since = time.monotonic()
        if time.monotonic() - self._left_since > _STUCK_SECONDS:
            print(self._failure, file=sys.stderr, flush=True)  # noqa: T201 - the last words
            os._exit(1)

    def _roll_call(self, error: RuntimeError) -> RankFailure | None:
        try:
            self._store.set("roll call", "1")
            self._store.set("news", "1")
            self._store.set(f"here/{self._rank}", "1")
            missing = self._await_keys("here", _HEARD_SECONDS)
        except Exception:  # noqa: BLE001 - whatever the store raises, it is gone
            # The process of torchrun holds the store, or rank 0 where there is none.
            host = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") else 0
            return _lost("The store of the process group", host, error)
        if not missing:
            return None
        names = ", ".join(map(str, missing))
        return _lost(f"Rank{'s' if len(missing) > 1 else ''} {names}", missing[0], error)

    def _await_keys(self, name: str, seconds: float) -> list[int]:
        """Wait for every rank's answer, and give those that sent none."""
        deadline = time.monotonic() + seconds
        missing = [rank for rank in range(self._size) if rank != self._rank]
        while True:
            missing = [rank for rank in missing if not self._store.check([f"{name}/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.05)


def _failure(rank: int, message: str) -> RankFailure:
    return RankFailure(
        f"Rank {rank} failed: {message}. This rank stopped with it, because a window needs every "
        "rank. Weights are as the last applied update left them.",
        rank=rank,
    )


def _lost(who: str, rank: int | None, error: RuntimeError) -> RankFailure:
    first = str(error).partition("\n")[0]
    host = " with rank 0, which held it" if rank == 0 and who.startswith("The store") else ""
    return RankFailure(
        f"{who} is gone without a word{host}: its process was killed, ran out of memory or left. "
        "This rank stopped, because a window needs every rank. Weights are as the last applied "
        f"update left them. Look at the log of that process. The collective said: {first}",
        rank=rank,
    )


def _watch(board_of: weakref.ref[Board], closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        board = board_of()
        if board is None:
            return
        try:
            board.look()
        except Exception:  # noqa: BLE001 - the store went with the process that held it
            return
        del board


def _close(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(2 * _POLL_SECONDS)  # a thread inside the store would outlive the interpreter

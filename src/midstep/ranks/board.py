"""The board: where a rank posts that it failed, and how the others hear of it.

Whoever failed takes part in no collective any more, so its news goes by the store that started the
process group. A thread of every rank looks there twice a second, because the rank itself may wait
inside a collective that will never end. The thread ends with the board, or with the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

from ..errors import RankFailure

__all__ = ["Board"]

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 3.0  # a few polls, and what a busy interpreter adds
_STUCK_SECONDS = 10.0


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
        self._window_left = 0  # by this rank, while it is not known that all have left it
        self._others_left_at = 0.0
        self._failure: RankFailure | None = None
        self._failed_at = 0.0
        self._has_failed = threading.Event()
        self._is_told = False  # this rank's own code knows that the run has failed
        closed = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), closed), name="midstep-board", daemon=True
        )
        weakref.finalize(self, _close, closed, thread)
        thread.start()

    @property
    def failure(self) -> RankFailure | None:
        """What ended this run, if something has."""
        if self._failure is not None:
            self._is_told = True
        return self._failure

    def post(self, message: str) -> None:
        """Tell the others that this rank failed, and wait until they have heard.

        The store may go with this process. Of several that fail at once the first is believed.
        """
        self._is_told = True
        if self._has_failed.is_set():
            return
        self._learn(_failure(self._rank, message))
        with contextlib.suppress(Exception):  # the store may be gone already
            if self._store.add("num failures", 1) == 1:
                self._store.set("failure", f"{self._rank} {message}")
                self._store.set("news", "1")
                self._missing("heard", _ANSWER_SECONDS)
            else:  # it failed by itself, and need not hear of another
                self._store.set(f"heard/{self._rank}", "1")

    def explained(self, error: RuntimeError) -> RankFailure | None:
        """Find out why a collective broke: a failure another rank posted, or a rank that is gone.

        Args:
            error: What the collective raised here.

        Returns:
            None when every rank is there and has nothing to say, so that the error stands for
            itself.
        """
        if not self._has_failed.wait(2 * _POLL_SECONDS):
            lost = self._roll_call(error)
            if lost is not None and not self._has_failed.is_set():
                self._learn(lost)
        return self.failure

    def leave_window(self) -> None:
        """Note that this rank left its window without a step."""
        self._window_left, self.window = self.window, 0
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self._window_left}/{self._rank}", "1")
            self._store.set(f"left/{self._window_left}", str(self._rank))

    def settle(self) -> RankFailure | None:
        """Make sure, after a window was left, that every rank has left it. No cost otherwise."""
        left, self._window_left = self._window_left, 0
        if not left or not self._missing(f"left/{left}", _STUCK_SECONDS):
            return None
        self.post(f"it left window {left} before its step, and other ranks went on with it")
        return self.failure

    def look(self) -> None:
        """Look once for what others have posted, and answer. Called by the thread."""
        window = self.window
        if self._store.check(["news"]):
            if self._store.check(["roll call"]):
                self._store.set(f"here/{self._rank}", "1")
            if not self._has_failed.is_set() and self._store.check(["failure"]):
                rank, message = self._store.get("failure").decode().split(" ", 1)
                self._learn(_failure(int(rank), message))
            self._store.set(f"heard/{self._rank}", "1")
        elif window and self._store.check([f"left/{window}"]):
            self._note_others_left(window)
        self._leave_when_stuck()

    def _learn(self, failure: RankFailure) -> None:
        self._failure = failure
        self._failed_at = time.monotonic()
        self._has_failed.set()

    def _note_others_left(self, window: int) -> None:
        """Another rank left this window: a fault, unless this one is about to leave it, too."""
        self._others_left_at = self._others_left_at or time.monotonic()
        if time.monotonic() - self._others_left_at < _STUCK_SECONDS / 2:
            return
        if self.window == window:
            rank = int(self._store.get(f"left/{window}"))
            self._learn(_failure(rank, f"it left window {window} before its step"))
        self._others_left_at = 0.0

    def _leave_when_stuck(self) -> None:
        """End a process that waits in a collective that nobody can complete.

        A wait ends when the process of the rank that failed does. It goes on where that one lives
        on after its error, and gloo knows no other way to end it.
        """
        if self._is_told or not self._has_failed.is_set() or not (self.depth or self.window):
            return
        if time.monotonic() - self._failed_at > _STUCK_SECONDS:
            print(self._failure, file=sys.stderr, flush=True)  # noqa: T201 - the last words
            os._exit(1)

    def _roll_call(self, error: RuntimeError) -> RankFailure | None:
        try:
            self._store.set(f"here/{self._rank}", "1")
            self._store.set("roll call", "1")
            self._store.set("news", "1")
            missing = self._missing("here", _ANSWER_SECONDS)
        except Exception:  # noqa: BLE001 - whatever it raises, the store is gone
            # torchrun holds the store in a process of its own, else rank 0 does.
            is_own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            return _lost("Rank 0" if is_own else "torchrun", 0 if is_own else None, error)
        if not missing:
            return None
        who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return _lost(who, missing[0], error)

    def _missing(self, name: str, seconds: float) -> list[int]:
        """Wait for the answer of every other rank, and give those that sent none."""
        deadline = time.monotonic() + seconds
        missing = [rank for rank in range(self._size) if rank != self._rank]
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([f"{name}/{rank}"])]
            time.sleep(0.05 if missing else 0.0)
        return missing


def _failure(rank: int, message: str) -> RankFailure:
    return RankFailure(
        f"Rank {rank} failed: {message}. This rank stopped with it, because a window needs every "
        "rank. Weights are as the last applied update left them.",
        rank=rank,
    )


def _lost(who: str, rank: int | None, error: RuntimeError) -> RankFailure:
    first = str(error).partition("\n")[0]
    return RankFailure(
        f"{who} is gone without a word: killed, out of memory, or ended early. This rank stopped "
        "with it, because a window needs every rank. Weights are as the last applied update left "
        f"them. Look at the log of that process. The collective said: {first}",
        rank=rank,
        is_lost=True,
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

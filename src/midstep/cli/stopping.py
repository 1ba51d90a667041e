"""Stopping: Ctrl-C and SIGTERM ask a run to end well; a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Stop"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked the run to stop.

    Attributes:
        signal: What they asked with; None when nobody did.
        notice: What is written to stderr when they do; None when the display shows it.
    """

    def __init__(self, notice: str | None = None) -> None:
        self.signal: signal.Signals | None = None
        self.notice = notice

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the first signal as a request; let the second raise KeyboardInterrupt.

        Outside of the main thread, where Python handles no signals, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [(number, signal.signal(number, self._on_signal)) for number in _SIGNALS]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self.notice is not None:
            # Not `print`: the signal may have come while the same stream was being written.
            os.write(2, f"{self.notice}\n".encode())

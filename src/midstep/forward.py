"""The forward of one microbatch: in its precision, and with sync between ranks where it is due."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from .ranks import Ranks

__all__ = ["Forward"]


class OpenWindow(Protocol):
    """What a forward must know of its window, and note in it."""

    index: int
    has_forward: bool

    @property
    def syncs(self) -> bool:
        """Whether the backward that follows adds up the gradients over the ranks."""
        ...


class Forward:
    """Autocast for one forward, and sync where it is due. Costs nothing in float32 on one rank.

    Args:
        window: Whose current microbatch it is.
        autocast: Of the precision; None where there is none.
        ranks: The other ranks; None for one alone.
    """

    __slots__ = ("_autocast", "_ranks", "_window")

    def __init__(
        self,
        window: OpenWindow,
        autocast: AbstractContextManager[Any] | None,
        ranks: Ranks | None,
    ) -> None:
        self._window = window
        self._autocast = autocast
        self._ranks = ranks

    def __enter__(self) -> None:
        window = self._window
        window.has_forward = True
        if self._ranks is not None:
            self._ranks.parallel.before_forward(index=window.index, is_last=window.syncs)
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(kind, error, trace)
        if self._ranks is not None:
            with self._ranks.failing():
                self._ranks.parallel.after_forward(failed=error is not None)
                if error is not None:
                    raise error

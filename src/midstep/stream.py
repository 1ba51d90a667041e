"""One pass over the data, with a look at whether a batch follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

__all__ = ["Stream"]

Batch = TypeVar("Batch")


class Stream(Iterator[Batch]):
    """One pass over the data that can tell whether a batch follows, by reading at most one ahead.

    Example:
        >>> stream = Stream(iter("ab"))
        >>> next(stream), stream.has_next(), next(stream), stream.has_next()
        ('a', True, 'b', False)
    """

    __slots__ = ("_batches", "_held", "is_over", "num_read")

    def __init__(self, batches: Iterator[Batch], *, num_read: int = 0) -> None:
        self._batches = batches
        self._held: list[Batch] = []
        self.num_read = num_read
        self.is_over = False  # known only once somebody asked for more

    def __next__(self) -> Batch:
        batch = self._held.pop() if self._held else next(self._batches)
        self.num_read += 1
        return batch

    def has_next(self) -> bool:
        """Look ahead by one batch, which is kept for the next read."""
        if self._held:
            return True
        for batch in self._batches:
            self._held.append(batch)
            return True
        self.is_over = True
        return False

    @property
    def is_ahead(self) -> bool:
        """Whether a batch has been read from the loader that nobody has used."""
        return bool(self._held)

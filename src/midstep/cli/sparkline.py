"""A curve in one line of text: the whole run, however long, in a few characters."""

from __future__ import annotations

import math

__all__ = ["Sparkline"]

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class Sparkline:
    """The course of a value. Costs a few numbers of memory.

    Each character is the mean of equally many values; when there are too many characters, each two
    become one.

    Args:
        width: Characters at most; even.

    Example:
        >>> line = Sparkline(4)
        >>> for value in (4.0, 3.0, 2.0, 1.0):
        ...     line.add(value)
        >>> [ord(mark) - 0x2580 for mark in line.text()]  # eighths of a block
        [8, 6, 3, 1]
    """

    def __init__(self, width: int = 24) -> None:
        self._width = width
        self._means: list[float] = []
        self._each = 1  # values behind a character
        self._sum, self._number = 0.0, 0

    def add(self, value: float | None) -> None:
        """Take a value in; None, inf and nan are left out."""
        if value is None or not math.isfinite(value):
            return
        self._sum += value
        self._number += 1
        if self._number < self._each:
            return
        self._means.append(self._sum / self._number)
        self._sum, self._number = 0.0, 0
        if len(self._means) > self._width:
            pairs = zip(self._means[::2], self._means[1::2], strict=False)
            rest = self._means[2 * (len(self._means) // 2) :]
            self._means = [(first + second) / 2 for first, second in pairs]
            self._sum, self._number = sum(rest) * self._each, self._each * len(rest)
            self._each *= 2

    def text(self) -> str:
        """Give the curve, from its lowest to its highest value; empty before there is one."""
        if len(self._means) < 2:
            return ""
        low, high = min(self._means), max(self._means)
        scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BLOCKS[int((mean - low) * scale + 0.5)] for mean in self._means)

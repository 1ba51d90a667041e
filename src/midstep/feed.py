"""The feed: windows one after the other, and what becomes of one that is not stepped.

A window begins with cleared gradients. One that was begun and not stepped is dropped: gradients
cleared, nothing ticked, its batches passed over, so that the next window is exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from .cursor import Cursor
from .cutting import Count, Cut, Cutting
from .window import Driver, Window

__all__ = ["Feed"]

Batch = TypeVar("Batch")


class Feed:
    """Begins and drops the windows of one updater.

    Args:
        model: Whose gradients are cleared.
        optimizer: Whose gradients are cleared, too, those of groups added later included.
        driver: What each window needs of the updater.

    Attributes:
        cursor: Where in the data the run is.
        window: The window that is open; None between two.
        started: When the open window's first batch was asked for, by `time.perf_counter`.
    """

    __slots__ = ("_driver", "_optimizer", "_parameters", "cursor", "started", "window")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, driver: Driver) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._driver = driver
        self.cursor = Cursor()
        self.window: Window[Any] | None = None
        self.started = 0.0

    def windows(
        self,
        batches: Iterable[Batch],
        way: Cutting,
        count: Count | None,
        begin: Callable[[Cut[Batch]], Window[Batch]],
    ) -> Iterator[Window[Batch]]:
        """Give the windows of one pass, each begun by `begin` once its batches are at hand."""
        cuts = way.cuts(self.cursor.open(batches), count)
        window: Window[Batch] | None = None
        try:
            while True:
                started = time.perf_counter()
                cut = next(cuts, None)
                if cut is None:
                    break
                window = begin(cut)
                self.started = started
                yield window
        finally:
            if window is not None and not window.ended:
                self.drop(window)
        self.cursor.close()

    def begin(self, cut: Cut[Batch], *, scale: float) -> Window[Batch]:
        """Open a window with cleared gradients; one still open is dropped."""
        if self.window is not None:
            self.drop(self.window)
        self.clear()
        self.started = time.perf_counter()
        self.window = window = Window(cut, self._driver, scale=scale)
        return window

    def end(self, window: Window[Any]) -> None:
        """Note that a window was stepped or dropped, and that its batches are used."""
        window.end()
        self.window = None
        self.cursor.mark()

    def drop(self, window: Window[Any]) -> None:
        """End a window without a step."""
        self.end(window)
        self.clear()

    def clear(self) -> None:
        """Clear every gradient."""
        for parameter in self._parameters:
            parameter.grad = None
        for group in self._optimizer.param_groups:  # also those added since
            for parameter in group["params"]:
                parameter.grad = None

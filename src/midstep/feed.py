"""The feed: windows one after the other, and what becomes of one that is not stepped.

A window begins with cleared gradients. One that was begun and not stepped is dropped: gradients
cleared, nothing ticked, its batches passed over, so that the next window is exact.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .autorows import Fit
from .cursor import Cursor
from .cutting import ByAutoRows, Count, Cut, Cutting, Elastic
from .observers.observing import Observing
from .seeds import power_of_two
from .window import Driver, Window

__all__ = ["Feed"]

Batch = TypeVar("Batch")


class Feed:
    """Begins and drops the windows of one updater.

    Args:
        model: Whose gradients are cleared.
        optimizer: Whose gradients are cleared, too, those of groups added later included.
        driver: What each window needs of the updater.
        observing: Told when a window begins and ends.

    Attributes:
        cursor: Where in the data the run is.
        window: The window that is open; None between two.
        started: When the open window's first batch was asked for, by `time.perf_counter`.
        fit: The largest microbatch that fits, where it is found by `AutoRows`.
        divisor: What a streamed window on several ranks divides by in backward, the same on all: a
            power of two near the last such window's denominator.
    """

    __slots__ = (
        "_asked",
        "_driver",
        "_observing",
        "_optimizer",
        "_parameters",
        "_stand_in",
        "cursor",
        "divisor",
        "fit",
        "started",
        "window",
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        driver: Driver,
        observing: Observing,
    ) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._driver = driver
        if observing.watches_microbatches:
            self._driver = dataclasses.replace(
                driver,
                on_batch=observing.on_batch,
                before_backward=observing.before_backward,
                after_backward=observing.after_backward,
            )
        self._observing = observing
        self.cursor = Cursor()
        self.window: Window[Any] | None = None
        self.started = 0.0
        self._stand_in: Elastic[Any] | None = None  # where windows may be run again
        self._asked: float | None = None  # when a window that is about to begin was asked for
        self.divisor = 1024.0
        self.fit = Fit()

    def state_dict(self) -> dict[str, Any]:
        """Give the place in the data, the divisor of the next streamed window, and what fits."""
        return {
            "cursor": self.cursor.state_dict(),
            "divisor": self.divisor,
            "fit": self.fit.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what the state does not name stays as it is."""
        if "cursor" in state:
            self.cursor.load_state_dict(state["cursor"])
        self.divisor = state.get("divisor", self.divisor)
        if "fit" in state:
            self.fit.load_state_dict(state["fit"])

    def windows(
        self,
        batches: Iterable[Batch],
        way: Cutting,
        count: Count | None,
        begin: Callable[[Cut[Batch] | None], Window[Batch] | None],
    ) -> Iterator[Window[Batch]]:
        """Give the windows of one pass, each begun by `begin` once its batches are at hand."""
        ranks = self._driver.ranks
        elastic: Elastic[Any] | None = None
        if isinstance(way, ByAutoRows):
            elastic = Elastic(None, count, way.auto)
        if ranks is not None and elastic is not None and not ranks.parallel.runs_alone:
            raise ValueError(
                "`windows(rows=ms.AutoRows())` with a model that is sharded or split over ranks, "
                "or has SyncBatchNorm: every forward and backward is a collective of all ranks, so "
                "none can run its window again by itself. Give `rows` as a number; `ms.plan(...)` "
                "finds one."
            )
        cuts = way.cuts(self.cursor.open(batches), count, read_ahead=ranks is not None)
        window: Window[Batch] | None = None
        try:
            while True:
                self._asked = time.perf_counter()
                cut = self._next(cuts)
                if cut is None and ranks is None:
                    break
                self._stand_in = elastic
                window = begin(cut)
                self._stand_in = None
                if window is None:
                    break
                yield window
        finally:
            self._asked = None
            if window is not None and not window.ended:
                self.drop(window)
        self.cursor.close()

    def _next(self, cuts: Iterator[Cut[Batch]]) -> Cut[Batch] | None:
        """Read and count the next window; an error in it reaches the other ranks."""
        if self._driver.ranks is None:
            return next(cuts, None)
        with self._driver.ranks.failing():
            return next(cuts, None)

    def begin(
        self, cut: Cut[Batch] | None, *, scale: float | Tensor, is_counted: bool
    ) -> Window[Batch] | None:
        """Open a window with cleared gradients; one still open is dropped.

        On several ranks they open it together: one small collective. A rank without batches takes
        part as long as any other has some.

        Returns:
            The window; None when no rank has a batch left.
        """
        if self.window is not None:
            self.drop(self.window)
        self.clear()
        if self._driver.accumulation is not None:
            self._driver.accumulation.begin()
        self.started = time.perf_counter() if self._asked is None else self._asked
        self._asked = None
        ranks = self._driver.ranks
        if ranks is None:
            assert cut is not None
            self.window = window = Window(cut, self._driver, scale=scale)
            self._observing.begin(window, self.started)
            return window
        has_cut = cut is not None
        elastic = self._stand_in
        cut = cut or Cut(iter(()), [] if is_counted else None, 0, num_known=0, elastic=elastic)
        # A look must see the gradients of this rank before they are those of all.
        syncs_late = self._driver.look is not None
        reruns = cut.elastic is not None
        opening = ranks.open(cut, has_cut=has_cut, syncs_late=syncs_late, reruns=reruns)
        if opening is None:
            return None
        window = Window(
            cut,
            self._driver,
            scale=scale,
            num_in_all=opening.num_microbatches,
            divisor=None if is_counted else self.divisor,
        )
        window.tally.agree(opening.denominators, {})
        self.window = window
        self._observing.begin(window, self.started)
        return window

    def attempt(
        self,
        window: Window[Batch],
        cut: Cut[Batch],
        take_step: Callable[[torch.optim.Optimizer], None],
    ) -> Window[Batch]:
        """Make an open window once more, of other pieces of its batch.

        Dropping it drops nothing else; stepping it ends the open one. On several ranks gradients
        are added up after its last backward, so that its backwards need no other rank.
        """
        ranks = self._driver.ranks
        if ranks is not None:
            ranks.parallel.begin_again()
        attempt = Window(
            cut,
            dataclasses.replace(self._driver, drop=Window.end, take_step=take_step),
            scale=window.scale,
            divisor=self.divisor if ranks is not None and cut.counts is None else None,
        )
        if cut.counts is not None:
            attempt.tally.agree(window.denominators, {})
        self._observing.begin(attempt, self.started)
        return attempt

    def end(self, window: Window[Any]) -> None:
        """Note that a window was stepped, and that its batches are used."""
        if window.tally.counts is None:
            total = next(iter(window.denominators.values()), 0)
            self.divisor = power_of_two(total) if total else self.divisor
        if self._driver.ranks is not None:
            self._driver.ranks.world.agreed()
            self._driver.ranks.world.end_window()
        self._close(window)

    def _close(self, window: Window[Any]) -> None:
        window.end()
        self._observing.end()
        self.window = None
        self.cursor.mark()

    def drop(self, window: Window[Any]) -> None:
        """End a window without a step; on several ranks all of them must."""
        if self._driver.ranks is not None:
            self._driver.ranks.leave()
        self._close(window)
        self.clear()

    def clear(self) -> None:
        """Clear every gradient."""
        for parameter in self._parameters:
            parameter.grad = None
        for group in self._optimizer.param_groups:  # also those added since
            for parameter in group["params"]:
                parameter.grad = None
        if self._driver.accumulation is not None:
            self._driver.accumulation.forget()

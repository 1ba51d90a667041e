"""One pass of a window through the model, kept well enough to be made again.

Whatever runs a window a second time (to find the microbatch that brought a nan, say) must draw the
same random numbers on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar

from torch import nn

from .blame import first_bad_microbatch
from .ranks import Ranks
from .snapshot import RandomState
from .window import Loss, Window

__all__ = ["LossFunction", "Pass", "counted_already"]

Batch = TypeVar("Batch")
LossFunction = Callable[[Any, Batch], Loss | Mapping[str, Loss]]


class Pass(Generic[Batch]):
    """A forward and a backward for each microbatch of a window.

    Args:
        window: Whose microbatches.
        model: Passed on to the loss.
        loss: Gives the loss sum of a microbatch.
    """

    __slots__ = ("_draws", "_loss", "_model", "_seen", "_window")

    def __init__(self, window: Window[Batch], model: nn.Module, loss: LossFunction[Batch]) -> None:
        self._window = window
        self._model = model
        self._loss = loss
        self._draws: list[RandomState] = []
        self._seen: list[Batch] = []

    def run(self) -> Self:
        """Run it, and keep the microbatches and the random state each began with."""
        window, draws_between = self._window, self._window.is_read_as_it_goes
        for batch in window:
            if draws_between or not self._draws:  # reading a batch may draw, too
                self._draws.append(RandomState.capture_torch())
            self._seen.append(batch)
            with window.forward():
                value = self._loss(self._model, batch)
            window.backward(value)
        return self

    def first_bad_microbatch(self, look: Callable[[], bool], ranks: Ranks | None) -> int | None:
        """Run it again, and find the first microbatch after which a gradient is not finite.

        Args:
            look: Whether every gradient is finite so far.
            ranks: The other ranks; all run it again.
        """
        again = self._window.again(self._seen, look)
        return first_bad_microbatch(again, self._model, self._loss, self._draws, ranks)


def counted_already() -> ValueError:
    """Say that a window of `windows(...)` takes no further count."""
    return ValueError(
        "`update(window, loss, count=...)`: this window has its counts already, from "
        "`windows(...)`. Pass `count` there."
    )

"""What an observer is: it looks at every n-th update and adds fields to the record of it.

The order of an update calls it at fixed points; between two updates that are due it costs nothing.
What it measured is a `Reading`: numbers that may still be on their way from the device, or may only
be this rank's part of a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..gradients import Gradients
from ..ranks import Ranks
from .tap import OpenWindow, Tap

__all__ = ["Numbers", "Observer", "OpenWindow", "Reading", "Subject"]

Numbers: TypeAlias = Sequence[float] | Tensor | Callable[[], Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What is observed: the parts of one updater.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        parameters: What the optimizer steps, each once, in its order.
        names: Of the parameters.
        ranks: The other ranks; None for one alone.
        tap: Measures microbatches, for all that ask.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Sequence[Tensor]
    names: Sequence[str]
    ranks: Ranks | None
    tap: Tap = dataclasses.field(default_factory=Tap)

    def open_tap(self, window: OpenWindow) -> None:
        """Have the microbatches of a window measured."""
        rank_factor = 1.0 if self.ranks is None else self.ranks.parallel.seed_factor
        self.tap.open(window, self.parameters, rank_factor)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What one observer measured in one update.

    Attributes:
        numbers: In float64. A tensor of shape [n] where they may still be on an accelerator, or a
            function that waits for them.
        fields: Makes the fields of the record out of them, once they are read.
        is_part: Whether they are this rank's part of a sum over all ranks.
    """

    numbers: Numbers
    fields: Callable[[Sequence[float]], Mapping[str, Any]]
    is_part: bool = False


class Observer:
    """Looks at every n-th update. Subclass it, and override the points at which it looks.

    The points come in this order, in updates that are due alone: `begin`; `on_batch`,
    `before_backward` and `after_backward` of each microbatch; `on_gradients`, `before_step`,
    `after_step`, `read`, `end`.
    An update that is skipped has no step; a window that is dropped goes from anywhere to `end`.

    An observer belongs to one updater. It may read whatever it likes and must change nothing.

    Args:
        every: Look at updates `every`, `2 * every` and so on; at least 1.

    Raises:
        ValueError: `every` is below 1.

    Example:
        >>> import midstep as ms
        >>> class Largest(ms.observers.Observer):
        ...     def on_gradients(self, gradients):
        ...         self.found = gradients.norm(float("inf"))
        ...     def read(self):
        ...         return [ms.observers.Reading([self.found], lambda x: {"largest": x[0]})]
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Largest()])
        >>> record = updater.update(
        ...     [torch.ones(1, 2)], lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["largest"]
        1.0
    """

    needs_each = False  # whether the norm of each gradient is asked for
    watches_microbatches = False  # whether it is told of each

    def __init__(self, *, every: int = 1) -> None:
        if isinstance(every, bool) or not every >= 1:
            raise ValueError(
                f"`{type(self).__name__}(every={every!r})`: must be a number of updates of at "
                "least 1; 1 looks at each of them."
            )
        self.every = every

    def __repr__(self) -> str:
        return f"{type(self).__name__}(every={self.every})"

    def attach(self, subject: Subject) -> None:
        """Learn what is observed, when the updater is made; refuse what cannot be.

        Args:
            subject: The parts of the updater.
        """

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Get ready, before the first microbatch is handed out.

        Args:
            subject: The parts of the updater; parameters as they are now.
            window: The window, about to be run.
            started: When its first batch was asked for, by `time.perf_counter`.
        """

    def on_batch(self, index: int) -> None:
        """A microbatch is handed out to the loop.

        Args:
            index: Its position in the window, from 0.
        """

    def before_backward(self, index: int) -> None:
        """The forward of a microbatch is done."""

    def after_backward(self, index: int) -> None:
        """Its backward is done, too."""

    def on_gradients(self, gradients: Gradients) -> None:
        """Everything is added up: the true gradient of the mean loss, before clipping.

        Args:
            gradients: Finite or not; to be measured, not to be changed.
        """

    def before_step(self, gradients: Gradients) -> None:
        """The gradient is clipped, and the weights are still as they were."""

    def after_step(self, gradients: Gradients) -> None:
        """The optimizer has stepped."""

    def read(self) -> Iterable[Reading]:
        """Give what was measured; called once, however the update ended."""
        return ()

    def end(self) -> None:
        """Let go of everything that was kept for this update."""

    def state_dict(self) -> dict[str, Any]:
        """Give what it remembers from update to update."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what an earlier run remembered."""

"""Rates: who sets the learning rate, and when.

The schedule follows the number of applied updates and nothing else. The first update uses the
schedule's first value; a skipped one does not move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Rates", "Schedule", "rates_of"]

Schedule = LRScheduler | ReduceLROnPlateau | Callable[[int], float]


class Rates(Protocol):
    """Sets the rate of the next update."""

    @property
    def kind(self) -> str:
        """What kind of schedule it is; a saved state fits the same kind only."""
        ...

    def tick(self, step: int) -> None:
        """Move on after an applied update; `step` counts them, this one included."""
        ...

    def report(self, metric: float) -> None:
        """Take the metric of a `ReduceLROnPlateau`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from an earlier run."""
        ...


def rates_of(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> Rates:
    """Find out how a schedule is driven.

    Raises:
        ValueError: The scheduler belongs to another optimizer.
        TypeError: It is no schedule.
    """
    if schedule is None:
        return _Fixed()
    if isinstance(schedule, LRScheduler):  # torch's ReduceLROnPlateau is one, too
        if schedule.optimizer is not optimizer:
            raise ValueError(
                f"`schedule` is a {type(schedule).__name__} of another optimizer, so it would move "
                "rates that nobody uses. Make it with the optimizer that this Updater steps."
            )
        if isinstance(schedule, ReduceLROnPlateau):
            return _Plateau(schedule)
        return _Stepped(schedule)
    if callable(schedule):
        return _ClosedForm(optimizer, schedule)
    raise TypeError(
        f"`schedule` is a `{type(schedule).__name__}`. Pass a torch LRScheduler, or a function "
        "from the number of applied updates to the factor on the base rate."
    )


class _Fixed:
    @property
    def kind(self) -> str:
        return "none"

    def tick(self, step: int) -> None:
        """Leave the rate to the caller."""

    def report(self, metric: float) -> None:
        """Refuse: nobody listens."""
        raise ValueError(
            "`report_metric()`: this Updater's schedule takes no metric. Pass "
            "`schedule=ReduceLROnPlateau(optimizer)`."
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the optimizer's own state holds its rates."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Nothing to take."""


class _Stepped(_Fixed):
    """Any torch scheduler, stepped once per applied update."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    @property
    def kind(self) -> str:
        return type(self._scheduler).__name__

    def tick(self, step: int) -> None:
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        self._scheduler.load_state_dict(dict(state))


class _Plateau(_Stepped):
    """ReduceLROnPlateau: moves when it is given its metric, not with the updates."""

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        super().__init__(scheduler)
        self._plateau = scheduler

    def tick(self, step: int) -> None:
        """Wait for the metric."""

    def report(self, metric: float) -> None:
        self._plateau.step(metric)


class _ClosedForm(_Fixed):
    """A pure function of the step; the factor on each group's `initial_lr`."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Callable[[int], float]) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self.tick(0)

    @property
    def kind(self) -> str:
        return getattr(self._schedule, "__name__", type(self._schedule).__name__)

    def tick(self, step: int) -> None:
        factor = self._schedule(step)
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                rate.fill_(group.setdefault("initial_lr", rate.clone()) * factor)
            else:
                group["lr"] = group.setdefault("initial_lr", rate) * factor

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        self.tick(step)

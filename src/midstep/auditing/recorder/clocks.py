"""Clocks: schedules that tick, and loaders that begin and end a pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..events import Epoch, NewSchedule, Tick
from .core import Recorder
from .stepping import real_optimizer

__all__ = ["watch_loaders", "watch_schedules"]


def watch_schedules(recorder: Recorder) -> None:
    """Watch every schedule of torch, also those inside others, each once a call.

    Args:
        recorder: Writes it down.
    """
    depth = [0]
    ticking = _ticking(recorder, depth)
    for cls in [lr_scheduler.LRScheduler, *descendants(lr_scheduler.LRScheduler)]:
        if "step" in vars(cls):
            recorder.patches.attribute(cls, "step", ticking)
        if "__init__" in vars(cls):
            # Making a schedule sets the first rate by a step of its own.
            recorder.patches.attribute(cls, "__init__", _apart(depth))
    if not issubclass(lr_scheduler.ReduceLROnPlateau, lr_scheduler.LRScheduler):
        recorder.patches.attribute(lr_scheduler.ReduceLROnPlateau, "step", ticking)


def descendants(cls: type) -> Iterator[type]:
    """Yield the classes that inherit from one."""
    child: type
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def _apart(depth: list[int]) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    return watch


def _ticking(recorder: Recorder, depth: list[int]) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                result = original(self, *args, **kwargs)
            finally:
                # Also where it raises: some schedules do so past their end.
                depth[0] -= 1
                if recorder.is_active and not depth[0]:
                    mine = _know(recorder, self)
                    recorder.add(Tick(recorder.here(), mine, int(getattr(self, "last_epoch", -1))))
            return result

        return step

    return watch


def _know(recorder: Recorder, schedule: Any) -> int:
    known = recorder.others.find(schedule)
    if known is not None:
        return known
    mine = recorder.others.of(schedule)
    optimizer = real_optimizer(getattr(schedule, "optimizer", None))
    number = recorder.optimizers.find(optimizer) if optimizer is not None else None
    recorder.add(
        NewSchedule(recorder.here(), mine, type(schedule).__name__, number, horizon_of(schedule))
    )
    return mine


def horizon_of(schedule: Any) -> float:
    """Return the number of ticks a schedule is made for; nan where it has no end of its own."""
    names = {
        "CosineAnnealingLR": "T_max",
        "LinearLR": "total_iters",
        "PolynomialLR": "total_iters",
        "OneCycleLR": "total_steps",
    }
    name = names.get(type(schedule).__name__)
    return math.nan if name is None else float(getattr(schedule, name, math.nan))


def watch_loaders(recorder: Recorder) -> None:
    """Watch where a pass over a `DataLoader` begins and ends.

    Args:
        recorder: Writes it down.
    """
    owners: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def beginning(original: Any) -> Any:
        def __iter__(self: Any) -> Any:  # noqa: N807 - its place
            iterator = original(self)
            if recorder.is_active:
                try:
                    length = len(self)
                except TypeError:
                    length = -1
                owners[iterator] = recorder.others.of(self), length
                recorder.add(Epoch(recorder.here(), *owners[iterator], is_over=False))
            return iterator

        return __iter__

    def reading(original: Any) -> Any:
        def __next__(self: Any) -> Any:  # noqa: N807 - its place
            try:
                return original(self)
            except StopIteration:
                if recorder.is_active and self in owners:
                    recorder.add(Epoch(recorder.here(), *owners[self], is_over=True))
                raise

        return __next__

    recorder.patches.attribute(DataLoader, "__iter__", beginning)
    recorder.patches.attribute(_BaseDataLoaderIter, "__next__", reading)

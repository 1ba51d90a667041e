"""The loops a caller may write, as functions from an updater and its data to records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import midstep as ms

Loop = Callable[[ms.Updater, Iterable[Any]], Iterator[ms.UpdateRecord]]

SIZE = 2


def loss(model: Any, batch: Any) -> ms.LossSum:
    return ms.cross_entropy(model(batch[0]), batch[1])


def first_door(updater: ms.Updater, data: Iterable[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(data, size=SIZE, count=ms.targets()):
        yield updater.update(window, loss)


def second_door(updater: ms.Updater, data: Iterable[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(data, size=SIZE):
        yield stepped(updater, window)


def counted_second_door(updater: ms.Updater, data: Iterable[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(data, size=SIZE, count=ms.targets()):
        yield stepped(updater, window)


def streamed_first_door(updater: ms.Updater, data: Iterable[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(data, size=SIZE):
        yield updater.update(window, loss)


def stepped(updater: ms.Updater, window: ms.Window[Any]) -> ms.UpdateRecord:
    for batch in window:
        with window.forward():
            loss_sum = loss(updater.model, batch)
        window.backward(loss_sum)
    return window.step()


LOOPS: dict[str, Loop] = {
    "update": first_door,
    "loop, streamed": second_door,
    "loop, counted": counted_second_door,
    "update, streamed": streamed_first_door,
}

"""History: events put together into the updates of each optimizer.

An update is one attempt at a step, with the backwards whose gradients it used: those that were new,
and those that an earlier step had used already. What was cleared unused is kept, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from .events import (
    Backward,
    Clear,
    Clip,
    Event,
    Forward,
    NewOptimizer,
    Place,
    Recording,
    Rescaled,
    ScalerStep,
    Step,
)
from .written import written

__all__ = ["Discard", "History", "Update"]

E = TypeVar("E", bound=Event)


@written
class Update:
    """One attempt of one optimizer.

    Attributes:
        optimizer: Its number.
        first: Index of the first event after the optimizer's attempt before this one.
        last: Index of the attempt.
        event: The attempt.
        params: Parameters that had a gradient.
        applied: Whether the weights were changed.
        backwards: Index and event of each backward that no step of this optimizer had used.
        stale: The same of those that one had used, and that were not cleared since.
        discarded: What was cleared unused since the attempt before.
        shared: Backwards that another optimizer had used before, for some of the same parameters.
    """

    optimizer: int
    first: int
    last: int
    event: Step | ScalerStep
    params: frozenset[int]
    applied: bool
    backwards: list[tuple[int, Backward]]
    stale: list[tuple[int, Backward]]
    discarded: list[Discard]
    shared: list[Backward]

    @property
    def place(self) -> Place | None:
        """The line of the attempt."""
        return self.event.place

    @property
    def size(self) -> int:
        """Number of new backwards."""
        return len(self.backwards)


@written
class Discard:
    """Gradients that were cleared before any step had used them."""

    index: int  # of the clearing
    clear: Clear
    start: int  # of the backward
    backward: Backward
    params: frozenset[int]


@written
class _Pending:
    index: int
    backward: Backward
    params: frozenset[int]
    used: dict[int, int] = dataclasses.field(default_factory=dict)  # optimizer: index of its step
    # Also by a step that was skipped.
    tried: set[int] = dataclasses.field(default_factory=set)


class History:
    """The updates of one process, in order.

    Args:
        recording: Its events.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.events = recording.events
        self.optimizers: dict[int, NewOptimizer] = {}
        self.updates: dict[int, list[Update]] = {}
        self.discards: list[Discard] = []
        self.forward_syncs: dict[int, bool] = {}  # by the index of the backward
        self._pending: list[_Pending] = []
        self._starts: dict[int, int] = {}
        self._forwards: list[Forward] = []
        for index, event in enumerate(self.events):
            self._read(index, event)
        self.left = [(p.index, p.backward, p.params) for p in self._pending if not p.tried]

    def _read(self, index: int, event: Event) -> None:
        if isinstance(event, NewOptimizer):
            self.optimizers[event.optimizer] = event
            self.updates[event.optimizer] = []
            self._starts[event.optimizer] = index
        elif isinstance(event, Forward):
            self._forwards.append(event)
        elif isinstance(event, Backward):
            if event.params:
                self._pending.append(_Pending(index, event, event.params))
            mine = [f.syncs for f in self._forwards if f.params & event.params or not f.params]
            if mine:
                self.forward_syncs[index] = mine[-1]
            self._forwards.clear()
        elif isinstance(event, Clear):
            self._clear(index, event)
        elif isinstance(event, ScalerStep):
            self._attempt(index, event, event.optimizer, self._params_of_step(index, event))
        elif isinstance(event, Step) and event.scaler is None:
            self._attempt(index, event, event.optimizer, event.params)

    def _params_of_step(self, index: int, event: ScalerStep) -> frozenset[int]:
        for earlier in self.events[max(0, index - 4) : index]:
            if isinstance(earlier, Step) and earlier.optimizer == event.optimizer:
                return earlier.params
        return self.optimizers[event.optimizer].params

    def _clear(self, index: int, event: Clear) -> None:
        kept = []
        for pending in self._pending:
            gone = pending.params & event.params
            if gone and not pending.tried:
                self.discards.append(Discard(index, event, pending.index, pending.backward, gone))
            if gone:
                pending.params -= event.params
            if pending.params:
                kept.append(pending)
        self._pending = kept

    def _attempt(
        self, index: int, event: Step | ScalerStep, number: int, params: frozenset[int]
    ) -> None:
        mine = self.optimizers[number].params
        first = self._starts[number]
        applied = event.applied if isinstance(event, ScalerStep) else event.found_inf == 0
        fresh, stale, shared = [], [], []
        for pending in self._pending:
            if not pending.params & mine:
                continue
            if number in pending.used:
                stale.append((pending.index, pending.backward))
            elif number not in pending.tried:
                if pending.used:
                    shared.append(pending.backward)
                fresh.append((pending.index, pending.backward))
            pending.tried.add(number)
            if applied:
                pending.used[number] = index
        discarded = [d for d in self.discards if d.index >= first and d.params & mine]
        self.updates[number].append(
            Update(*(number, first, index, event, params, applied, fresh, stale, discarded, shared))
        )
        self._starts[number] = index + 1

    # What checks ask.

    def index_of(self, event: Event) -> int:
        """Index of an event."""
        return next(index for index, other in enumerate(self.events) if other is event)

    def all_updates(self) -> Iterator[Update]:
        """Every update, optimizer by optimizer."""
        for updates in self.updates.values():
            yield from updates

    def between(self, first: int, last: int, kind: type[E]) -> list[tuple[int, E]]:
        """Index and event of each event of a kind, from `first` up to but without `last`."""
        found = enumerate(self.events[first:last], start=first)
        return [(index, event) for index, event in found if isinstance(event, kind)]

    def of_kind(self, kind: type[E]) -> list[tuple[int, E]]:
        """Index and event of every event of a kind."""
        return self.between(0, len(self.events), kind)

    def clips_of(self, update: Update) -> list[tuple[int, Clip]]:
        """The clips since the attempt before, of parameters that this optimizer steps.

        Those before the first backward of the update saw gradients that were cleared unused.
        """
        mine = self.optimizers[update.optimizer].params
        first = update.backwards[0][0] if update.backwards else update.first
        clips = self.between(max(first, update.first), update.last, Clip)
        return [(index, clip) for index, clip in clips if clip.given & mine]

    def ratio_of(self, update: Update) -> float:
        """By what the gradients were multiplied by hand after the last backward; nan if unclear."""
        ratio = 1.0
        if not update.backwards:
            return ratio
        mine = self.optimizers[update.optimizer].params
        for _, event in self.between(update.backwards[-1][0], update.last, Rescaled):
            if event.params & mine:
                ratio *= event.ratio
        return ratio

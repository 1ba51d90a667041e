"""Observing: the one call-out for observers in the order of an update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..gradients import Gradients
from .observer import Observer, OpenWindow, Reading, Subject
from .readings import fields_of

__all__ = ["Observing", "clip_fields"]


class Observing:
    """The observers of one updater. Without any, and in updates that are not due, it does nothing.

    Args:
        observers: What looks, in the order of the fields in the record.
        subject: The parts of the updater.
        next_update: Gives the number of an update that is about to begin.
        names_of: Names parameters that were added later.

    Raises:
        TypeError: One is no observer, or two are of one kind.
        NotImplementedError: One cannot look at a model that is shared among ranks in this way.
    """

    __slots__ = ("_due", "_names_of", "_next_update", "_observers", "_subject")

    def __init__(
        self,
        observers: Sequence[Observer],
        subject: Subject,
        next_update: Callable[[], int],
        names_of: Callable[[nn.Module, Sequence[Tensor]], Sequence[str]],
    ) -> None:
        _check(observers)
        self._observers = list(observers)
        self._due: list[Observer] = []
        self._subject = subject
        self._next_update = next_update
        self._names_of = names_of
        if observers:
            for observer in self._observers:
                observer.attach(self._present())

    @property
    def is_due(self) -> bool:
        """Whether anyone looks at this update."""
        return bool(self._due)

    @property
    def watches_microbatches(self) -> bool:
        """Whether anyone wants to be told of each backward."""
        return any(observer.watches_microbatches for observer in self._observers)

    @property
    def needs_each(self) -> bool:
        """Whether anyone that is due asks for the norm of each gradient."""
        return any(observer.needs_each for observer in self._due)

    def begin(self, window: OpenWindow, started: float) -> None:
        """Begin an update: find out who looks at it.

        Args:
            window: The window, about to be run.
            started: When its first batch was asked for.
        """
        self.end()
        if not self._observers:
            return
        update = self._next_update()
        self._due = [o for o in self._observers if update % o.every == 0]
        if self._due:
            subject = self._present()
            for observer in self._due:
                observer.begin(subject, window, started)

    def on_batch(self, index: int) -> None:
        """A microbatch is handed out."""
        for observer in self._due:
            observer.on_batch(index)

    def before_backward(self, index: int) -> None:
        """The forward of a microbatch is done."""
        for observer in self._due:
            observer.before_backward(index)

    def after_backward(self, index: int) -> None:
        """Its backward is done, too."""
        for observer in self._due:
            observer.after_backward(index)

    def on_gradients(self, gradients: Gradients) -> None:
        """Everything is added up, and nothing clipped."""
        for observer in self._due:
            observer.on_gradients(gradients)

    def before_step(self, gradients: Gradients) -> None:
        """The gradient is clipped, and the weights are as they were."""
        for observer in self._due:
            observer.before_step(gradients)

    def after_step(self, gradients: Gradients) -> None:
        """The optimizer has stepped."""
        for observer in self._due:
            observer.after_step(gradients)

    def extra(self, threshold: float | None) -> Mapping[str, Any]:
        """Give what the record holds beside its own fields.

        Costs, where parts of what was measured lie on several ranks, one small collective.

        Args:
            threshold: What the clip rule held the update against; None where there is none.
        """
        known = clip_fields(threshold)
        if not self._due:
            return known
        readings = [reading for observer in self._due for reading in observer.read()]
        return fields_of(self._whole(readings), known)

    def end(self) -> None:
        """End an update, or drop it."""
        for observer in self._due:
            observer.end()
        self._due = []

    def state_dict(self) -> dict[str, Any]:
        """Give what each observer remembers, by its kind."""
        states = {type(o).__name__: o.state_dict() for o in self._observers}
        return {kind: state for kind, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have each observer take its own part; one that is new begins anew."""
        for observer in self._observers:
            if type(observer).__name__ in state:
                observer.load_state_dict(state[type(observer).__name__])

    def _present(self) -> Subject:
        """The subject with the parameters of now: groups may have been added."""
        groups = self._subject.optimizer.param_groups
        parameters = list(dict.fromkeys(p for group in groups for p in group["params"]))
        if list(map(id, parameters)) != list(map(id, self._subject.parameters)):
            names = self._names_of(self._subject.model, parameters)
            self._subject = dataclasses.replace(self._subject, parameters=parameters, names=names)
        return self._subject

    def _whole(self, readings: list[Reading]) -> list[Reading]:
        ranks = self._subject.ranks
        parts = [r.numbers for r in readings if r.is_part and not callable(r.numbers)]
        if ranks is None or not parts:
            return readings
        wholes = iter(ranks.world.sums(parts))
        return [
            dataclasses.replace(r, numbers=next(wholes), is_part=False) if r.is_part else r
            for r in readings
        ]


def clip_fields(threshold: float | None) -> dict[str, Any]:
    """Give what a record says of a bound that an update was held against."""
    if threshold is None or not math.isfinite(threshold):
        return {}
    return {"clip_max_norm": threshold}


def _check(observers: Sequence[Observer]) -> None:
    for observer in observers:
        if not isinstance(observer, Observer):
            raise TypeError(
                f"`Updater(observers=[{observer!r}])`: is no observer. Pass objects such as "
                "`ms.observers.GradNorms()`; what is called with each record is a sink."
            )
    kinds = [type(observer).__name__ for observer in observers]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise TypeError(
                f"`Updater(observers=...)`: two of kind `{kind}`, whose fields would overwrite "
                "each other. Pass one, with the smaller `every`."
            )

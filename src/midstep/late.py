"""Late: the order of a step whose verdict stays on the device until the next update.

    launch: norm -> sound? -> factor -> step, unread     settle: read -> judge -> tick -> record

An update is settled before the next is launched, so schedule, clip threshold and averaged weights
see every verdict in time, while the weights are still those of its own update. An update that turns
out not to be sound has changed nothing: the kernel left weights and optimizer state as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .clip.rule import DecidesUnread, Decision, Rule
from .ending import Books
from .gradients import Gradients
from .nonfinite import Policy
from .observers.observer import Subject
from .observers.observing import Observing
from .records import UnreadRecord
from .stepping import is_begun, skips_on_device
from .unread import Unread, launched
from .window import Window

__all__ = ["Late"]


class Late:
    """At most one update that was launched and not settled.

    Args:
        subject: What is trained, and by what.
        rule: What clips.
        nonfinite: What to do with an update that was not sound.
        books: What ticks and writes the record.
        commit: Called with the decision on an update that was applied.
        observing: Who looks at updates; gives what a record holds beside its own fields.
        wanted: Whether the caller asks for it; None for where it pays.

    Attributes:
        is_on: Whether any update is launched at all.

    Raises:
        ValueError: It is wanted and cannot be.
    """

    def __init__(
        self,
        subject: Subject,
        rule: Rule,
        nonfinite: Policy,
        books: Books,
        commit: Callable[[Decision], None],
        *,
        observing: Observing,
        wanted: bool | None,
    ) -> None:
        self._optimizer = subject.optimizer
        self._rule = rule
        self._nonfinite = nonfinite
        self._books = books
        self._commit = commit
        self._extra = observing.extra
        self._names: Mapping[Tensor, str] = dict(
            zip(subject.parameters, subject.names, strict=True)
        )
        self._unread: Unread | None = None
        why = _why_eager(subject.optimizer, rule, nonfinite)
        if subject.ranks is not None:
            why = "the ranks tell each other on the host what a window is over"
        elif observing.has_observers:
            why = "its observers look at every update on the host"
        if wanted and why is not None:
            raise ValueError(
                f"`Updater(lazy=True)`: {why}; so each update must be looked at before the next "
                "can begin. Change that, or leave `lazy` out."
            )
        on_host = any(p.is_cpu for p in subject.parameters)
        self.is_on = wanted if wanted is not None else why is None and not on_host

    def can_take(self, gradients: Gradients) -> bool:
        """Whether this update can be launched: dense, on one device, the optimizer begun."""
        if not self.is_on:
            return False
        device = gradients.tensors[0].device
        return (
            all(t.device == device for t in gradients.tensors)
            and not any(p.grad is None or p.grad.is_sparse for p in gradients.parameters)
            and is_begun(self._optimizer)
        )

    def launch(self, window: Window[Any], gradients: Gradients, *, seconds: float) -> UnreadRecord:
        """Step on a window without a look. No host sync."""
        assert isinstance(self._rule, DecidesUnread)
        clock = self._books.clock
        self._unread = launched(
            window,
            gradients,
            self._optimizer,
            self._rule,
            self._books.loss_scale,
            step=clock.step,
            seconds=seconds,
        )
        return self._unread.record_of(self.settle, update=clock.update + 1)

    def settle(self) -> None:
        """Read what was launched, and do what had to wait for it.

        Raises:
            NonFiniteGradient: By policy.
            CountMismatch: A loss carried another count than its window found.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        clock, loss_scale = self._books.clock, self._books.loss_scale
        told = unread.read()
        extra = self._extra(told.decision.threshold if told.is_applied else None)
        ending = unread.ending(told, loss_scale=loss_scale.value, extra=extra)
        if told.is_applied:
            self._commit(told.decision)
        else:
            is_clean = unread.first_bad_microbatch() is None
            explained = is_clean and loss_scale.explains_overflow()
            if not self._nonfinite.goes_on(clock.skipped_in_a_row, explained=explained):
                update = clock.update + 1
                unread.fill(self._books.record_of(unread.window, ending, update=update))
                names = [self._names.get(p, "a parameter") for p in unread.parameters]
                raise unread.error(told, names, update=update)
        record = self._books.tick(unread.window, ending)
        unread.fill(record)
        self._books.publish(record)

    def forget(self) -> None:
        """Settle nothing: the state that it would change is about to be replaced."""
        self._unread = None


def _why_eager(optimizer: torch.optim.Optimizer, rule: Rule, nonfinite: Policy) -> str | None:
    """Say what needs the host in every update; None when nothing does."""
    if not skips_on_device(optimizer):
        return (
            f"`{type(optimizer).__name__}` has no kernel that skips a bad step by itself. Pass "
            "`fused=True` (Adam, AdamW, SGD, Adagrad)"
        )
    if not isinstance(rule, DecidesUnread) or rule.p not in (2.0, float("inf")):
        return (
            f"`{rule!r}` decides on the host. Clip by `ms.ByGlobalNorm` of order 2 or inf, or not "
            "at all"
        )
    if nonfinite.every_microbatch:
        return f"`{nonfinite!r}` looks at the gradients after every microbatch"
    return None

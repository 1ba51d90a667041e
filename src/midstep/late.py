"""Late: the order of a step whose verdict stays on the device until the next update.

    launch: norm -> sound? -> factor -> step, unread     settle: read -> judge -> tick -> record

An update is settled before the next is launched, so schedule, clip threshold and averaged weights
see every verdict in time, while the weights are still those of its own update. An update that turns
out not to be sound has changed nothing: the kernel left weights and optimizer state as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .clip.rule import DecidesUnread, Decision, Rule
from .ending import Books
from .errors import MidstepError
from .gradients import Gradients
from .nonfinite import Policy
from .observers.observer import Subject
from .observers.observing import Observing, clip_fields
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
        observing: Who looks at updates; one that is due is not launched.
        wanted: Whether the caller asks for it; None for where it pays: on one rank, on an
            accelerator.

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
        self._observing = observing
        self._ranks = subject.ranks
        self._names: Mapping[Tensor, str] = dict(
            zip(subject.parameters, subject.names, strict=True)
        )
        self._unread: Unread | None = None
        why = _why_eager(subject.optimizer, rule, nonfinite)
        if why is None and subject.ranks is not None:
            why = subject.ranks.why_eager(rule.p)
        if wanted and why is not None:
            raise ValueError(
                f"`Updater(lazy=True)`: {why}; so each update must be looked at before the next "
                "can begin. Change that, or leave `lazy` out."
            )
        pays = subject.ranks is None and not any(p.is_cpu for p in subject.parameters)
        self.is_on = wanted if wanted is not None else why is None and pays

    @property
    def next_update(self) -> int:
        """The number of an update that is about to begin."""
        return self._books.clock.update + 1 + (self._unread is not None)

    def can_take(self, window: Window[Any], gradients: Gradients) -> bool:
        """Whether this update can be launched: nobody looks, dense, one device, optimizer begun.

        The same on all ranks, which share what they are asked about.
        """
        if not self.is_on or self._observing.is_due or not any(window.denominators.values()):
            return False
        if self._ranks is not None and not self._is_launched_alike(window, gradients):
            return False
        device = gradients.tensors[0].device
        return (
            all(t.device == device for t in gradients.tensors)
            and not any(p.grad is None or p.grad.is_sparse for p in gradients.parameters)
            and is_begun(self._optimizer)
        )

    def launch(self, window: Window[Any], gradients: Gradients, *, started: float) -> UnreadRecord:
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
            seconds=time.perf_counter() - started,
            copies=None if self._ranks is None else self._ranks.copies,
        )
        return self._unread.record_of(self._asked, update=clock.update + 1)

    def settle(self) -> None:
        """Read what was launched, and do what had to wait for it. On several ranks all must.

        Raises:
            NonFiniteGradient: By policy.
            CountMismatch: A loss carried another count than its window found.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        try:
            self._tell(unread)
        except MidstepError as error:
            error.on_all_ranks = True  # they were told the same numbers
            raise

    def _asked(self) -> None:
        """Settle because a record is read, maybe on this rank alone: then the others hear of it."""
        try:
            self.settle()
        except MidstepError as error:
            error.on_all_ranks = False
            if self._ranks is None:
                raise
            with self._ranks.failing():
                raise

    def _tell(self, unread: Unread) -> None:
        clock, loss_scale = self._books.clock, self._books.loss_scale
        told = unread.read()
        extra = clip_fields(told.decision.threshold if told.is_applied else None)
        ending = unread.ending(told, loss_scale=loss_scale.value, extra=extra)
        if told.is_applied:
            self._commit(told.decision)
        else:
            explained = not unread.has_bad_loss() and loss_scale.explains_overflow()
            if not self._nonfinite.goes_on(clock.skipped_in_a_row, explained=explained):
                update = clock.update + 1
                unread.fill(self._books.record_of(unread.window, ending, update=update))
                names = [self._names.get(p, "a parameter") for p in unread.parameters]
                raise unread.error(told, names, update=update)
        record = self._books.tick(unread.window, ending)
        unread.fill(record)
        self._books.publish(record)

    def _is_launched_alike(self, window: Window[Any], gradients: Gradients) -> bool:
        """Whether its loss is counted ahead, and squares of norms stay in range.

        Not where a rank may take the others back before the step: they ask each other on the host.
        """
        tally = window.tally
        is_known = tally.counts is not None and not tally.is_agreed and window.take_step is None
        return is_known and not any(t.dtype is torch.float64 for t in gradients.tensors)

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

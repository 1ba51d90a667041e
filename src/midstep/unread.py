"""Unread updates: launched with their verdict on the device, told to the host one update later.

    norm -> is it sound? -> factor -> the kernel steps, or leaves everything as it is

Nothing above is read by the host. What it must know is copied to it while the device works on, and
is looked at before the next step is launched, when the copy has long arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .blame import unread_error
from .clip.rule import DecidesUnread, Decision
from .ending import Ending
from .gradients import Gradients, unread_norms, wide_dtype
from .precision import LossScale
from .records import UnreadRecord, UpdateRecord, Verdict
from .stepping import step_unread
from .window import Window

__all__ = ["Told", "Unread", "launched"]

# The kernels take the factor as a float32 that they divide by.
_SMALLEST, _GREATEST = 2.0**-100, 2.0**100


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What the host has been told.

    Attributes:
        is_applied: Whether the kernel stepped.
        grad_norm: Before clipping.
        decision: What the clip rule came to.
        bad: Positions of the gradients that were not finite.
    """

    is_applied: bool
    grad_norm: float
    decision: Decision
    bad: Sequence[int]


@dataclasses.dataclass(slots=True)
class Unread:
    """One update that was launched.

    Attributes:
        window: Ended; its losses are read with the rest.
        parameters: Those with a gradient.
        lr: The rate of each group: numbers, or copies of tensors.
        seconds: Until it was launched.
        threshold: What the clip rule held it against.
    """

    window: Window[Any]
    parameters: Sequence[Tensor]
    lr: list[float | Tensor]
    seconds: float
    threshold: float | None
    _numbers: Tensor
    _event: torch.Event | None
    _record: UnreadRecord | None = None

    def record_of(self, ask: Callable[[], None], *, update: int) -> UnreadRecord:
        """Make what the caller holds; reading it asks.

        Args:
            ask: Settles this update.
            update: Its number.
        """
        known = {
            "update": update,
            "num_microbatches": self.window.num_microbatches,
            "denominators": self.window.denominators,
            "seconds": self.seconds,
        }
        self._record = UnreadRecord.asking(ask, known)
        return self._record

    def fill(self, record: UpdateRecord) -> None:
        """Give the caller's record its fields."""
        assert self._record is not None
        self._record.fill(record)

    def first_bad_microbatch(self) -> int | None:
        """The first whose loss was not finite, once read."""
        return self.window.tally.first_nonfinite()

    def ending(self, told: Told, *, loss_scale: float, extra: Mapping[str, Any]) -> Ending:
        """How it ended.

        Args:
            told: What was read.
            loss_scale: What its losses were multiplied by.
            extra: What else the record holds.
        """
        ending = Ending(
            verdict=Verdict.APPLIED if told.is_applied else Verdict.SKIPPED_NONFINITE,
            lr=[float(rate) for rate in self.lr],
            loss_scale=loss_scale,
            seconds=self.seconds,
            grad_norm=told.grad_norm,
            extra=extra,
        )
        if told.is_applied:
            return dataclasses.replace(ending, decision=told.decision)
        # The gradients are gone: so many tensors, each of which has an entry at least.
        return dataclasses.replace(ending, num_nonfinite=len(told.bad))

    def read(self) -> Told:
        """Wait until the copy has arrived, which it has long since when another update came.

        Raises:
            CountMismatch: A loss carried another count than the window found; nothing was stepped.
        """
        if self._event is not None:
            self._event.synchronize()
        norm, coefficient, found_inf, *rest = self._numbers.tolist()  # of host memory
        norms, losses = rest[: len(self.parameters)], rest[len(self.parameters) :]
        self.window.tally.read(iter(losses))
        if found_inf:
            for count in self.window.tally.unread_counts:
                count.check()
        self.window.tally.unread_counts.clear()
        return Told(
            not found_inf,
            norm,
            Decision(coefficient != 1.0, coefficient, threshold=self.threshold),
            [i for i, n in enumerate(norms) if not abs(n) < float("inf")],
        )

    def error(self, told: Told, names: Sequence[str], *, update: int) -> Exception:
        """Say what is not finite, as far as it is known once the gradients are gone."""
        bad = [names[i] for i in told.bad]
        microbatch = self.window.tally.first_nonfinite()
        return unread_error(bad, microbatch, norm=told.grad_norm, update=update)


@torch.no_grad()
def launched(
    window: Window[Any],
    gradients: Gradients,
    optimizer: torch.optim.Optimizer,
    rule: DecidesUnread,
    loss_scale: LossScale,
    *,
    step: int,
    seconds: float,
) -> Unread:
    """Launch one update: norm, verdict, factor, step and loss scale, with nothing read.

    One read of the gradients and the optimizer's own pass; the rest are numbers.

    Args:
        window: Its gradients are complete.
        gradients: As its backwards left them.
        optimizer: One that skips on the device.
        rule: What bounds them.
        loss_scale: Moves on the device.
        step: Applied updates so far.
        seconds: What the window took.
    """
    device = gradients.tensors[0].device
    wide = wide_dtype(device)
    norms = unread_norms(gradients.tensors, rule.p)
    unit = window.unit
    norm = torch.linalg.vector_norm(norms, rule.p) * unit
    coefficient, threshold = rule.decide_unread(norm, step)
    factor = coefficient * unit
    is_sound = norm.isfinite() & (factor > _SMALLEST) & (factor < _GREATEST)
    overflow = (~is_sound).float()
    for count in window.tally.unread_counts:
        # Written so that nan is too far; an error later, and no step now.
        is_sound &= (count.gap().abs() <= 1.0).to(device)
    found_inf = (~is_sound).float()
    rates = [_kept(group["lr"]) for group in optimizer.param_groups]
    step_unread(optimizer, gradients, factor, found_inf, window.take_step)
    loss_scale.update_unread(overflow)
    scalars = [norm, coefficient, found_inf, *window.tally.unread_sums()]
    numbers = torch.stack([number.to(device, wide) for number in scalars])
    host, event = _on_the_way(torch.cat([numbers[:3], norms, numbers[3:]]))
    return Unread(window, gradients.parameters, rates, seconds, threshold, host, event)


def _kept(lr: float | Tensor) -> float | Tensor:
    return lr.detach().clone() if isinstance(lr, Tensor) else float(lr)


def _on_the_way(numbers: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Begin to copy numbers to the host, and give what says that they have arrived."""
    if numbers.is_cpu:
        return numbers, None
    host = numbers.to("cpu", non_blocking=True)  # into pinned memory
    event = torch.Event(numbers.device)
    event.record()
    return host, event

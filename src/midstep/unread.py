"""Unread updates: launched with their verdict on the device, told to the host one update later.

    norm -> is it sound? -> factor -> the kernel steps, or leaves everything as it is

Nothing above is read by the host. What it must know is copied to it while the device works on, and
is looked at before the next step is launched, when the copy has long arrived.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .blame import unread_error
from .clip.rule import DecidesUnread, Decision
from .ending import Ending
from .errors import WindowError
from .gradients import Gradients, wide_dtype
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
        terms: Whose loss sums over all ranks come with the numbers; none on one rank.
    """

    window: Window[Any]
    parameters: Sequence[Tensor]
    lr: list[float | Tensor]
    seconds: float
    threshold: float | None
    terms: Sequence[str]
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

    def has_bad_loss(self) -> bool:
        """Whether the loss of a microbatch, of any rank, was not finite; once read."""
        means = self.window.tally.loss_means().values()
        return not all(mean is None or math.isfinite(mean) for mean in means)

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
            WindowError: A loss carried another count than the window found; nothing was stepped.
        """
        if self._event is not None:
            self._event.synchronize()
        norm, coefficient, found_inf, is_off, *rest = self._numbers.tolist()  # of host memory
        numbers, tally = iter(rest), self.window.tally
        norms = [next(numbers) for _ in self.parameters]
        tally.read(numbers)
        tally.agree({}, dict(zip(self.terms, numbers, strict=True)))
        if is_off:
            tally.check_unread()
            raise _counted_otherwise()
        tally.unread_counts.clear()
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
        elsewhere = microbatch is None and self.has_bad_loss()
        return unread_error(
            bad, microbatch, norm=told.grad_norm, update=update, elsewhere=elsewhere
        )


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
    copies: int | None,
) -> Unread:
    """Launch one update: norm, verdict, factor, step and loss scale, with nothing read.

    One read of the gradients and the optimizer's own pass; the rest are numbers. On several ranks
    one small collective, for which the host does not wait either.

    Args:
        window: Its gradients are complete.
        gradients: As its backwards left them.
        optimizer: One that skips on the device.
        rule: What bounds them.
        loss_scale: Moves on the device.
        step: Applied updates so far.
        seconds: What the window took.
        copies: How many ranks see the same data; None on one rank.
    """
    device, tally = gradients.tensors[0].device, window.tally
    wide = wide_dtype(device)
    zero = torch.zeros((), dtype=wide, device=device)
    gaps = [count.gap().abs().to(device, wide) for count in tally.unread_counts]
    # Written so that nan is too far.
    is_off = torch.stack([~(gap <= 1.0) for gap in gaps]).any().to(wide) if gaps else zero
    terms: list[str] = [] if copies is None else sorted(tally.denominators)
    totals = [tally.unread_total(term) for term in terms]
    ride = torch.stack([is_off, *(zero if t is None else t.to(device, wide) for t in totals)])
    norms, sums = gradients.unread_norms(rule.p, ride)
    is_off = sums[0]
    unit = window.unit
    norm = torch.linalg.vector_norm(norms, rule.p) * unit
    coefficient, threshold = rule.decide_unread(norm, step)
    factor = coefficient * unit
    is_sound = norm.isfinite() & (factor > _SMALLEST) & (factor < _GREATEST)
    overflow = (~is_sound).float()
    is_sound &= is_off == 0.0  # an error later, and no step now
    found_inf = (~is_sound).float()
    rates = [_kept(group["lr"]) for group in optimizer.param_groups]
    step_unread(optimizer, gradients, factor, found_inf, window.take_step)
    loss_scale.update_unread(overflow)
    scalars = [norm, coefficient, found_inf, is_off, *tally.unread_sums()]
    numbers = torch.stack([number.to(device, wide) for number in scalars])
    told = torch.cat([numbers[:4], norms, numbers[4:], sums[1:] / (copies or 1)])
    host, event = _on_the_way(told)
    return Unread(window, gradients.parameters, rates, seconds, threshold, terms, host, event)


def _counted_otherwise() -> WindowError:
    return WindowError(
        "On another rank a loss carried another count than its window found, so the mean would be "
        "off by their ratio. Nothing was stepped. The error of that rank names the microbatch."
    )


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

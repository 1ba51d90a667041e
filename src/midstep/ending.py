"""Ending: what ticks when an update has its verdict, and the record that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .arithmetic.decay import DecayExponents
from .clip.rule import Attempt, Decision
from .clock import Clock
from .observers.readings import joined
from .precision import LossScale
from .rates import Rates
from .records import UpdateRecord, Verdict
from .sinks import Guarded
from .stepping import weight_decays_of
from .window import Window

if TYPE_CHECKING:
    from .ranks import Ranks

__all__ = ["UNDECIDED", "Books", "Ending", "total_of"]

UNDECIDED = Decision(clipped=False, coefficient=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How one update ended.

    Attributes:
        verdict: Applied or skipped.
        lr: The rate it used, one per parameter group.
        loss_scale: What its losses were multiplied by.
        seconds: What it took.
        grad_norm: Before clipping; None where there was none.
        decision: What the clip rule said.
        num_nonfinite: Entries of the gradient that were inf or nan.
        extra: What observers added.
    """

    verdict: Verdict
    lr: list[float]
    loss_scale: float
    seconds: float
    grad_norm: float | None = None
    decision: Decision = UNDECIDED
    num_nonfinite: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Books:
    """What is kept of every update: the clocks, each ticking by its own rule, and the records.

    Args:
        loss_scale: Moves after every attempt.
        rates: Move after applied updates.
        sinks: Called with each record.
        ranks: The other ranks, whose weights may be due for a comparison.
        optimizer: Whose groups decay their weights.

    Attributes:
        clock: Counts updates.
        sinks: Called with each record.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        rates: Rates,
        sinks: Sequence[Callable[[UpdateRecord], None]],
        ranks: Ranks | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.clock = Clock()
        self._decays = DecayExponents()
        self._optimizer = optimizer
        self.loss_scale = loss_scale
        self.rates = rates
        self.sinks = [Guarded(sink) for sink in sinks]
        self._ranks = ranks

    def attempt(self, window: Window[Any]) -> Attempt:
        """What a clip rule may know of an update."""
        clock, loss_mean = self.clock, total_of(window.tally.loss_means())
        return Attempt(clock.step, loss_mean, skipped_in_a_row=clock.skipped_in_a_row)

    def tick(self, window: Window[Any], ending: Ending) -> UpdateRecord:
        """Tick every clock that this ending moves, and write the record."""
        clock, verdict = self.clock, ending.verdict
        clock.tick(
            verdict,
            num_microbatches=window.num_microbatches,
            denominators=window.denominators,
        )
        if verdict is not Verdict.SKIPPED_EMPTY:
            self.loss_scale.update(found_inf=verdict is Verdict.SKIPPED_NONFINITE)
        if verdict.applied:
            self._decays.add(ending.lr, weight_decays_of(self._optimizer))
            self.rates.tick(clock.step)
        return self.record_of(window, ending, update=clock.update)

    def record_of(self, window: Window[Any], ending: Ending, *, update: int) -> UpdateRecord:
        """Write the record of an ending; nothing ticks."""
        loss_means = window.tally.loss_means()
        extra = ending.extra
        if any(self._decays.totals):
            extra = joined(extra, {"decay_exponent": list(self._decays.totals)})
        return UpdateRecord(
            update=update,
            step=self.clock.step,
            verdict=ending.verdict,
            num_microbatches=window.num_microbatches,
            denominators=window.denominators,
            loss_means=loss_means,
            loss_mean=total_of(loss_means),
            grad_norm=ending.grad_norm,
            clip_coefficient=ending.decision.coefficient,
            clipped=ending.decision.clipped,
            lr=ending.lr,
            loss_scale=ending.loss_scale,
            num_nonfinite=ending.num_nonfinite,
            seconds=ending.seconds,
            extra=extra,
        )

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs of the clocks."""
        return {
            "clock": self.clock.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "rates": self.rates.state_dict(),
            "decay_exponents": self._decays.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier run.

        Raises:
            ValueError: The loss scale is on in one run and off in the other.
        """
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.clock.load_state_dict(state["clock"])
        self.rates.load_state_dict(state["rates"], self.clock.step)
        if "decay_exponents" in state:
            self._decays.load_state_dict(state["decay_exponents"])

    def publish(self, record: UpdateRecord) -> None:
        """Give a record to the sinks; after an applied update compare replicas, where it is due."""
        for sink in self.sinks:
            sink(record)
        if record.applied and self._ranks is not None:
            self._ranks.check_replicas(self.clock.step)


def total_of(loss_means: Mapping[str, float | None]) -> float | None:
    """Add up what the terms have found; None when none has."""
    found = [mean for mean in loss_means.values() if mean is not None]
    return sum(found) if found else None

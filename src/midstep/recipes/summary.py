"""The summary of a run: what its records add up to, and nothing that is not in them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..records import UpdateRecord
from .held_out import HeldOut

__all__ = ["Summary"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in a few numbers.

    Norms and the share clipped are those of applied updates: a skipped one reached no clip rule.

    Attributes:
        num_applied: Updates that changed the weights.
        num_skipped: Updates that did not, by verdict.
        num_microbatches: Of all updates.
        targets: What each loss term's means were over, summed over all updates.
        seconds: Spent in updates; held-out losses and checkpoints not included.
        mean_norm: Mean gradient norm before clipping; None when nothing was applied.
        largest_norm: The largest of them.
        num_clipped: Applied updates whose gradient was clipped.
        held_out: The last held-out loss; None when there is none.
        baselines: Held-out losses to beat, by name.
        notes: What the recipe says a reader must know.
    """

    num_applied: int
    num_skipped: Mapping[str, int]
    num_microbatches: int
    targets: Mapping[str, float]
    seconds: float
    mean_norm: float | None
    largest_norm: float | None
    num_clipped: int
    held_out: HeldOut | None
    baselines: Mapping[str, float]
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        records: Iterable[UpdateRecord],
        *,
        held_out: HeldOut | None = None,
        baselines: Mapping[str, float] | None = None,
        notes: Sequence[str] = (),
    ) -> Summary:
        """Add up the records of a run.

        Args:
            records: Of all its updates, applied and skipped.
            held_out: Its last held-out loss.
            baselines: What to print beside it.
            notes: What else a reader must know.
        """
        records = list(records)
        applied = [record for record in records if record.applied]
        norms = [record.grad_norm for record in applied if record.grad_norm is not None]
        targets: Counter[str] = Counter()
        for record in records:
            targets.update(record.denominators)
        return cls(
            num_applied=len(applied),
            num_skipped=Counter(str(record.verdict) for record in records if not record.applied),
            num_microbatches=sum(record.num_microbatches for record in records),
            targets=dict(targets),
            seconds=sum(record.seconds for record in records),
            mean_norm=statistics.fmean(norms) if norms else None,
            largest_norm=max(norms, default=None),
            num_clipped=sum(record.clipped for record in applied),
            held_out=held_out,
            baselines=dict(baselines or {}),
            notes=tuple(notes),
        )

    @property
    def clipped_share(self) -> float | None:
        """Clipped updates over applied ones; None when nothing was applied."""
        return self.num_clipped / self.num_applied if self.num_applied else None

    def lines(self) -> list[str]:
        """Put it in words, one fact a line."""
        facts = {
            "updates": self._update_words(),
            "norm at clip point": self._norm_words(),
            "clipped": self._clip_words(),
            "targets seen": self._target_words(),
            "held-out loss": self._held_out_words(),
        }
        lines = [f"{name:20}{words}" for name, words in facts.items()]
        return [*lines, *(f"{'note':20}{note}" for note in self.notes)]

    def _update_words(self) -> str:
        skipped = ", ".join(
            f"{number:,} {verdict.replace('skipped_', '')}"
            for verdict, number in sorted(self.num_skipped.items())
        )
        return (
            f"{self.num_applied:,} applied, {sum(self.num_skipped.values()):,} skipped"
            f"{f' ({skipped})' if skipped else ''}, from {self.num_microbatches:,} microbatches"
        )

    def _norm_words(self) -> str:
        if self.mean_norm is None or self.largest_norm is None:
            return "none: nothing was applied"
        return f"mean {self.mean_norm:.4g}, largest {self.largest_norm:.4g}"

    def _clip_words(self) -> str:
        if self.clipped_share is None:
            return "none: nothing was applied"
        return f"{self.clipped_share:.1%} of applied updates"

    def _target_words(self) -> str:
        if set(self.targets) <= {"loss"}:
            total = f"{self.targets.get('loss', 0):,.10g}"
        else:
            total = ", ".join(f"{number:,.10g} {term}" for term, number in self.targets.items())
        rate = next(iter(self.targets.values()), 0) / self.seconds if self.seconds else 0
        return f"{total} in {self.seconds:,.1f} s of updates ({rate:,.0f} a second)"

    def _held_out_words(self) -> str:
        if self.held_out is None:
            return "not measured"
        loss = self.held_out.loss_mean
        beside = [
            f"{_comparison(loss, baseline)} the baseline of {name}, {baseline:.4f}"
            for name, baseline in self.baselines.items()
        ]
        return ", ".join([f"{loss:.4f} after {self.held_out.step:,} updates", *beside])


def _comparison(loss: float, baseline: float) -> str:
    if math.isnan(loss):
        return "not below"
    return f"{abs(baseline - loss):.4f} {'below' if loss < baseline else 'above'}"

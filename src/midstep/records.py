"""What one update did: the verdict, and the record that people and tools read.

A record holds plain numbers, one JSON line each. This module decides the names and the spelling;
who writes the line where is left to the sinks.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["UpdateRecord", "Verdict"]


class Verdict(enum.StrEnum):
    """How an update ended; the same on every rank.

    Only `APPLIED` changed the weights and moved the schedule. Each member equals its string.

    Example:
        >>> Verdict.APPLIED == "applied", Verdict("skipped_empty").applied
        (True, False)
    """

    APPLIED = "applied"
    SKIPPED_NONFINITE = "skipped_nonfinite"
    SKIPPED_EMPTY = "skipped_empty"
    SKIPPED_SPIKE = "skipped_spike"

    @property
    def applied(self) -> bool:
        """Whether the optimizer stepped."""
        return self is Verdict.APPLIED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What one update saw and did. `print(record)` is one readable line.

    Attributes:
        update: Attempts so far, this one included; from 1.
        step: Applied updates so far, this one included when it was applied.
        verdict: How it ended.
        num_microbatches: Microbatches of the window, of all ranks.
        denominators: What each loss term's mean is over, in this window.
        loss_means: The true mean of each loss term; None for a term that found nothing to count.
        loss_mean: Their sum: the mean loss whose gradient was taken. Never the divided one.
        grad_norm: Norm of the gradient of `loss_mean` before clipping, in the clip rule's order p;
            None when the window was empty.
        clip_coefficient: Norm after clipping over norm before, 1.0 when nothing was clipped; None
            where clipping was not one number (value clipping) or was not reached.
        clipped: Whether the rule fired: for a norm rule, exactly when norm > max_norm.
        lr: The rate this update used, one per parameter group.
        loss_scale: What the loss was multiplied by in backward; 1.0 without scaling.
        num_nonfinite: Entries of the gradient that were inf or nan.
        seconds: From asking for the window's first batch to the verdict.
        extra: What observers added.

    Example:
        >>> record = UpdateRecord(
        ...     update=3, step=3, verdict=Verdict.APPLIED, num_microbatches=4,
        ...     denominators={"loss": 512}, loss_means={"loss": 2.5}, loss_mean=2.5, grad_norm=2.0,
        ...     clip_coefficient=0.5, clipped=True, lr=[3e-4], loss_scale=1.0, num_nonfinite=0,
        ...     seconds=0.125)
        >>> print(record)
        update 3 applied | loss 2.5000 | norm 2.000 clipped x0.500 | lr 3.00e-04 | 512 targets in 4
        microbatches | 0.125 s
        >>> UpdateRecord.from_json(record.to_json()) == record
        True
    """

    update: int
    step: int
    verdict: Verdict
    num_microbatches: int
    denominators: Mapping[str, float]
    loss_means: Mapping[str, float | None]
    loss_mean: float | None
    grad_norm: float | None
    clip_coefficient: float | None
    clipped: bool
    lr: list[float]
    loss_scale: float
    num_nonfinite: int
    seconds: float
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def applied(self) -> bool:
        """Whether this update changed the weights and moved the schedule."""
        return self.verdict is Verdict.APPLIED

    def to_json(self) -> str:
        """Give the record as one line of strict JSON, without the line break.

        inf and nan have no spelling in JSON, so they are the strings "inf", "-inf" and "nan".
        """
        values = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        values.update(values.pop("extra"))
        return json.dumps(values, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> UpdateRecord:
        """Read one line of `updates.jsonl`; fields it does not know become `extra`."""
        values = {key: _number(value) for key, value in json.loads(line).items()}
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        fields = {key: values[key] for key in known}
        fields["verdict"] = Verdict(fields["verdict"])
        return cls(**fields, extra={key: values[key] for key in values if key not in known})

    def __str__(self) -> str:
        parts = [f"update {self.update} {self.verdict.replace('_', ' (', 1)}"]
        if "_" in self.verdict:
            parts[0] += ")"
        if self.loss_mean is not None:
            parts.append(f"loss {self.loss_mean:.4f}")
        if self.grad_norm is not None:
            parts.append(f"norm {_short(self.grad_norm)}{self._clip_words()}")
        if self.num_nonfinite:
            parts.append(f"{self.num_nonfinite:,} non-finite")
        parts.append("lr " + " ".join(f"{lr:.2e}" for lr in self.lr))
        if self.loss_scale != 1.0:
            parts.append(f"scale {self.loss_scale:g}")
        plural = "" if self.num_microbatches == 1 else "es"
        parts.append(f"{self._target_words()} in {self.num_microbatches} microbatch{plural}")
        parts.append(f"{_short(self.seconds)} s")
        return " | ".join(parts)

    def _clip_words(self) -> str:
        if not self.clipped:
            return ""
        if self.clip_coefficient is None:
            return " clipped"
        return f" clipped x{_short(self.clip_coefficient)}"

    def _target_words(self) -> str:
        if len(self.denominators) == 1:
            return f"{next(iter(self.denominators.values())):,.10g} targets"
        return ", ".join(f"{n:,.10g} {term}" for term, n in self.denominators.items())


def _short(value: float) -> str:
    return f"{value:.3f}" if 1e-2 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _number(value: Any) -> Any:
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    return [_number(item) for item in value] if isinstance(value, list) else value

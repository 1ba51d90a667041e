"""The certificate: what was compared, within which bound, and why it is not equal where it is not.

Plain values only: it can be printed, kept as JSON, and compared.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import textwrap
from typing import Any

__all__ = ["Certificate", "Comparison", "Control", "Outcome", "Reason", "ReasonKind"]

_WIDTH = 96


class Outcome(enum.StrEnum):
    """How a check ended."""

    EQUAL = "equal"
    NOT_EQUAL = "not equal"
    NO_CERTIFICATE = "no certificate"


class ReasonKind(enum.StrEnum):
    """Why pieces do not add up to the whole."""

    LAYERS = "layers"
    LOSS = "loss"
    DRAWS = "draws"
    STATE = "state"
    DIVISOR = "divisor"
    MEAN_OF_MEANS = "mean of means"
    COUNT = "count"
    SIZE = "size"
    UPDATE = "update"
    UNEXPLAINED = "unexplained"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One cut against the whole batch.

    Attributes:
        cut: Its name.
        num_microbatches: Its pieces.
        gap: Length of the difference of the gradients over that of the whole one.
        worst: Largest difference of a parameter over its bound; equal means at most 1.
        worst_parameter: Which parameter that is.
        ratio: Accumulated over whole: the factor that brings them closest.
        update_worst: The same of the weights after the next update; None when none was made.
        failed: What a piece raised; empty when all ran.
    """

    cut: str
    num_microbatches: int
    gap: float
    worst: float
    worst_parameter: str
    ratio: float
    update_worst: float | None = None
    failed: str = ""

    @property
    def equal(self) -> bool:
        """Whether gradient and update are within their bounds."""
        updates = self.update_worst is None or self.update_worst <= 1
        return not self.failed and self.worst <= 1 and updates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A fault that was put in on purpose, to see that this very check would notice it.

    Attributes:
        fault: What was done.
        worst: Largest difference of a parameter over its bound.
    """

    fault: str
    worst: float

    @property
    def told_apart(self) -> bool:
        """Whether it was noticed."""
        return not self.worst <= 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why they differ, as an experiment showed.

    Attributes:
        kind: What sort of reason it is.
        what: The fact, with its figures.
        why: What it means.
        remedy: What to do.
        names: The layers, terms, buffers or streams.
    """

    kind: ReasonKind
    what: str
    why: str
    remedy: str
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether pieces of a batch add up to the whole of it. Printing it is a readable page.

    Attributes:
        outcome: Equal, not equal, or no certificate.
        summary: The outcome in a sentence.
        model: Class of the model.
        training: Whether it was in training mode.
        num_rows: Rows of the batch.
        num_parameters: Numbers that got a gradient.
        dtype: What it was computed in.
        gradient_norm: Length of the gradient of the whole batch.
        bound: How far rounding may part two computations of it, over its length.
        comparisons: One a cut.
        controls: The faults put in on purpose.
        reasons: Why they differ; empty when they do not.
        notes: What else was seen.
        update: What made the next update; empty when none was made.

    Example:
        >>> import torch, midstep as ms
        >>> certificate = ms.verify(
        ...     torch.nn.Linear(3, 1),
        ...     torch.randn(6, 3),
        ...     lambda model, x: model(x).square().sum(),
        ...     count=ms.rows(),
        ... )
        >>> certificate.equal, certificate.outcome.value, certificate.exit_code
        (True, 'equal', 0)
    """

    outcome: Outcome
    summary: str
    model: str
    training: bool
    num_rows: int
    num_parameters: int
    dtype: str
    gradient_norm: float
    bound: float
    comparisons: tuple[Comparison, ...]
    controls: tuple[Control, ...]
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    update: str = ""

    @property
    def equal(self) -> bool:
        """Whether it was shown that they are equal."""
        return self.outcome is Outcome.EQUAL

    @property
    def exit_code(self) -> int:
        """0 for equal, 1 for not equal, 2 for no certificate."""
        return list(Outcome).index(self.outcome)

    def to_json(self) -> str:
        """Give it as strict JSON; inf and nan are spelt as words."""
        return json.dumps(_plain(dataclasses.asdict(self)), allow_nan=False, indent=2)

    def __str__(self) -> str:
        lines = [*textwrap.wrap(f"{self.outcome.upper()}: {self.summary}", _WIDTH), ""]
        lines += _entry("set-up", self._set_up())
        lines += ["", *self._table()]
        if self.controls and self.outcome is not Outcome.NOT_EQUAL:
            lines += ["", *self._control_lines()]
        for number, reason in enumerate(self.reasons, 1):
            lines += ["", *_entry(f"reason {number}", f"{reason.kind}: {reason.what}")]
            lines += [*_entry("", reason.why), *_entry("", f"To do: {reason.remedy}")]
        for note in self.notes:
            lines += ["", *_entry("note", note)]
        return "\n".join(lines)

    def _set_up(self) -> str:
        mode = "training" if self.training else "evaluation"
        update = f"; next update by {self.update}" if self.update else ""
        return (
            f"{self.model} in {mode} mode, {self.num_rows} rows, {self.num_parameters:,} numbers "
            f"with a gradient of length {self.gradient_norm:.4g}, computed in {self.dtype}; "
            f"rounding may move it by {self.bound:.1e} of that{update}"
        )

    def _table(self) -> list[str]:
        has_update = any(c.update_worst is not None for c in self.comparisons)
        head = ["cut", "microbatches", "gap", "gap / bound", "accumulated / whole"]
        rows = [head + (["update gap / bound"] if has_update else [])]
        for c in self.comparisons:
            if c.failed:
                rows.append([c.cut, f"{c.num_microbatches}", "could not run"])
                continue
            row = [c.cut, f"{c.num_microbatches}", f"{c.gap:.1e}", f"{c.worst:.2g}"]
            row.append(f"{c.ratio:.6f}")
            if c.update_worst is not None:
                row.append(f"{c.update_worst:.2g}")
            rows.append(row)
        widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows
        ]

    def _control_lines(self) -> list[str]:
        seen = [
            f"{c.fault}: {'told apart' if c.told_apart else 'NOT told apart'} "
            f"({c.worst:.2g} x the bound)"
            for c in self.controls
        ]
        return _entry("controls", "; ".join(seen))


def _entry(name: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    return [f"{name if index == 0 else '':10}{line}" for index, line in enumerate(wrapped)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

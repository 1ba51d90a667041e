"""The plan: the ways that were found, best first, and the one that was run, measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..arithmetic import Line, show_bytes
from ..batches import num_rows
from ..precision import BF16, FP16, FP32, Precision
from ..recomputing import recompute
from ..updater import Updater
from .peaks import peak_of, storage_bytes
from .twin import with_rows
from .ways import Way

__all__ = ["Checked", "Plan"]

_PRECISIONS: dict[str, Callable[[], Precision]] = {"FP32": FP32, "BF16": BF16, "FP16": FP16}


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """What a way held when it was run, beside what was predicted.

    Attributes:
        way: That was run.
        predicted_bytes: Its predicted peak.
        measured_bytes: What was held before the update, and the most beyond it.
        seconds: Of the measured update, with the measuring.
        reserved_bytes: What the allocator of a CUDA device had reserved; None on the CPU.
    """

    way: Way
    predicted_bytes: int
    measured_bytes: int
    seconds: float
    reserved_bytes: int | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values."""
        return {**dataclasses.asdict(self), "error": self.error}

    def __str__(self) -> str:
        words = (
            f"predicted {show_bytes(self.predicted_bytes)}, measured "
            f"{show_bytes(self.measured_bytes)}: {100 * self.error:+.2f} %"
        )
        if self.reserved_bytes is not None:
            words += f"; the allocator reserved {show_bytes(self.reserved_bytes)}"
        return words


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Ways to an update of so many rows, best first. `print(plan)` is a table.

    Attributes:
        rows: Of an update, of all ranks together.
        num_ranks: That share the work.
        state: What one rank holds whatever the microbatch is, line by line.
        saved_bytes_a_row: What autograd saves in a forward for each row, in float32 and without
            recompute, each storage once.
        headroom: What is set aside.
        budget: Bytes of one rank's device; None when none was said.
        ways: Those that fit first, each with the reason.
        note: How it was found, where that was not by a trace without memory.
    """

    rows: int
    num_ranks: int
    state: list[Line]
    saved_bytes_a_row: float
    headroom: Line
    budget: int | None
    ways: list[Way]
    note: str = ""

    @property
    def best(self) -> Way | None:
        """The first way, where it fits."""
        return self.ways[0] if self.ways and self.ways[0].fits else None

    def check(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any, Any], Any],
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        way: Way | None = None,
    ) -> Checked:
        """Run a way for two updates on one rank and measure the second.

        The weights change; give a copy where that matters.

        Args:
            model: In real tensors.
            batch: One batch; pieces and repetitions of it are run.
            loss: As it was planned with.
            optimizer: Makes the optimizer from the model.
            way: Which; None for the best.

        Raises:
            ValueError: No way fits and none was given, or it is of several ranks.
        """
        chosen = way or self.best
        if chosen is None:
            raise ValueError("`check()`: no way fits the budget. Pass `way=` to run one anyway.")
        if self.num_ranks > 1:
            raise ValueError(
                f"`check()`: this plan is of {self.num_ranks} ranks, and one alone holds something "
                "else. Check a plan of one rank."
            )
        handle = recompute(model, every=chosen.every) if chosen.every else None
        try:
            updater = Updater(model, optimizer(model), precision=_PRECISIONS[chosen.precision]())
            return _measured(updater, with_rows(batch, self.rows), _bare(loss), chosen)
        finally:
            if handle is not None:
                handle.remove()
            model.zero_grad()

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.table()

    def table(self, few: int | None = 8) -> str:
        """Spell the state and the ways.

        Args:
            few: How many ways; None for all.
        """
        lines = [f"{line.name:20}{show_bytes(line.num_bytes)}" for line in self.state]
        saved = show_bytes(self.saved_bytes_a_row)
        lines.append(f"{'saved for backward':20}{saved} a row in float32, without recompute")
        if self.budget is not None:
            aside = show_bytes(self.headroom.num_bytes)
            lines.append(f"{'headroom':20}{aside}, {self.headroom.note}")
            lines.append(f"{'budget':20}{show_bytes(self.budget)}")
        lines += ["", self._advice(), "", _HEADER]
        lines += [_row(position, way) for position, way in enumerate(self.ways[:few], start=1)]
        num_fit = sum(way.fits for way in self.ways)
        note = _TIMED if any(way.is_timed for way in self.ways) else _COUNTED
        lines += ["", f"{num_fit} of {len(self.ways)} ways fit. {_LEGEND} {note}"]
        lines += [self.note] if self.note else []
        return "\n".join(lines)

    def _advice(self) -> str:
        """Say in a sentence what to do."""
        way = self.best
        if way is None:
            least = min(self.ways, key=lambda way: way.peak_bytes)
            again = ", with recompute" if least.every else ""
            return (
                f"Nothing fits: the least is {show_bytes(least.peak_bytes)}{again}, and the "
                "headroom. Adapters, a leaner optimizer or shards make it smaller."
            )
        every = "" if not way.every else f", `ms.recompute(model, every={way.every})`"
        return (
            f"Take microbatches of {way.rows:,} rows, {way.num_microbatches:,} an update, "
            f"`ms.{way.precision}()`{every}: {way.why}."
        )


_HEADER = (
    f"{'':3} {'rows':>5} {'pieces':>6} {'precision':>9} {'recompute':>9} {'rounds':>6} "
    f"{'peak':>26} {'time':>6}  why"
)
_LEGEND = (
    "Rows: of a microbatch; pieces: microbatches of an update; rounds: of communication; <=: an "
    "upper bound, read between two sizes that were traced."
)
_TIMED = "Time was measured at two sizes for each precision and recompute, on this machine."
_COUNTED = (
    "Time is counted in operations: a smaller microbatch keeps a device less busy, and 16 bits are "
    "faster where there is hardware for them."
)


def _row(position: int, way: Way) -> str:
    every = f"every {way.every}" if way.every else "none"
    mark = " " if way.fits else "x"
    peak = f"{'<= ' if way.is_bound else ''}{show_bytes(way.peak_bytes)}"
    return (
        f"{position:>2}{mark} {way.rows:>5} {way.num_microbatches:>6} {way.precision:>9} "
        f"{every:>9} {way.num_rounds:>6} {peak:>26} "
        f"{way.relative_time:>5.2f}x  {way.why}"
    )


def _measured(updater: Updater, batch: Any, loss: Callable[[Any, Any], Any], way: Way) -> Checked:
    def update() -> None:
        for window in updater.windows([batch], rows=way.rows, count=num_rows):
            updater.update(window, loss)

    update()  # makes the optimizer's state
    model, optimizer = updater.model, updater.optimizer
    optimizer.zero_grad()
    state = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor)]
    held = storage_bytes([*model.parameters(), *model.buffers(), *state])
    peak = peak_of(update, next(model.parameters()).device)
    return Checked(way, way.peak_bytes, held + peak.num_bytes, peak.seconds, peak.reserved_bytes)


def _bare(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Take the sum alone: the check divides by rows, whatever the loss counts."""

    def sums(model: Any, microbatch: Any) -> Any:
        value = loss(model, microbatch)
        values = list(value.values()) if isinstance(value, dict) else [value]
        parts = [getattr(x, "sum", x) if not isinstance(x, Tensor) else x for x in values]
        return sum(parts[1:], parts[0])

    return sums

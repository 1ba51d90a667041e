"""The tracer: peaks of all settings from few traces, and of the best few from their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..arithmetic import Sharded
from ..precision import FP32, Precision
from .trace import Held, Loss, Trace, flops_of, saved_by, trace
from .twin import Twin
from .ways import Layout, Way, most_at, ranked

__all__ = ["Tracer"]


class Tracer:
    """Traces each precision and recompute at the smallest and the largest size, and reads between.

    Args:
        twin: Of model and batch.
        loss: Of the update.
        sizes: Rows of the microbatches to choose from.
        layout: The ranks.
        held: What is held between updates.

    Attributes:
        held: As given.
        model: The twin's.
    """

    def __init__(
        self, twin: Twin, loss: Loss, sizes: Sequence[int], layout: Layout, held: Held
    ) -> None:
        self.held = held
        self.model = twin.model
        self._twin = twin
        self._loss = loss
        self._layout = layout
        self._ends = sorted({min(sizes), max(sizes)})
        self._traces: dict[tuple[str, int], list[Trace]] = {}
        self._alone: dict[tuple[str, int, int], Trace] = {}
        self._precisions: dict[str, Precision] = {}
        self._flops: dict[int, int] = {}

    @property
    def saved_bytes_a_row(self) -> float:
        """What autograd saves in a forward in float32 without recompute, each storage once."""
        rows = self._ends[0]
        return saved_by(self._twin, self._loss, rows=rows, precision=FP32()) / rows

    def relative_flops(self, every: int) -> float:
        """Give the operations with recompute over those without."""
        for k in {0, every} - self._flops.keys():
            self._flops[k] = flops_of(self._twin, self._loss, rows=self._ends[0], every=k)
        return self._flops[every] / self._flops[0] if self._flops[0] else 1.0

    def peak(
        self, precision: Precision, every: int, rows: int, pieces: int, *, defers: bool
    ) -> int:
        """Predict the peak of one rank from the traces there are.

        A microbatch that is alone in its window is traced only where that decides something; until
        then it counts as if all gradients were there before it.
        """
        name = type(precision).__name__
        self._precisions[name] = precision
        key = (name, every)
        if key not in self._traces:
            self._traces[key] = [self._trace(name, every, size) for size in self._ends]
        alone = self._alone.get((name, every, rows)) if pieces == 1 else None
        return self._peak(self._traces[key], alone, rows, defers=defers)

    def exactly(self, ways: Sequence[Way], room: int | None, *, few: int) -> list[Way]:
        """Trace the best few ways at their own size, until the best few stay.

        Args:
            ways: All there are.
            room: Bytes there are, headroom taken off; None for no limit.
            few: How many.
        """
        order = [self._if_alone(way, room) for way in ways]
        while True:
            order = ranked(order)
            position = next((i for i, way in enumerate(order[:few]) if way.is_bound), None)
            if position is None:
                return order
            order[position] = self._at_its_size(order[position], room)

    def _if_alone(self, way: Way, room: int | None) -> Way:
        """Trace a window of one microbatch, where the gradients may make it seem too large."""
        if way.num_microbatches > 1 or room is None or way.fits:
            return way
        if way.peak_bytes - self.held.gradients > room:
            return way
        return self._at_its_size(way, room)

    def _at_its_size(self, way: Way, room: int | None) -> Way:
        key = (way.precision, way.every)
        traces = self._traces[key]
        alone = None
        if way.num_microbatches == 1:
            alone = self._trace(way.precision, way.every, way.rows, is_alone=True)
            self._alone[*key, way.rows] = alone
        elif way.rows not in {trace.rows for trace in traces}:
            traces.append(self._trace(way.precision, way.every, way.rows))
            traces.sort(key=lambda trace: trace.rows)
        peak = self._peak(traces, alone, way.rows, defers=way.defers)
        fits = room is None or peak <= room
        return dataclasses.replace(way, peak_bytes=peak, is_bound=False, fits=fits)

    def _peak(
        self, traces: Sequence[Trace], alone: Trace | None, rows: int, *, defers: bool
    ) -> int:
        layout, held = self._layout, self.held
        state = {line.name: line.num_bytes for line in layout.state(held, defers=defers)}
        gradients = state.pop("gradients", 0)
        base = sum(state.values())
        in_window = gradients + most_at(traces, rows) if alone is None else alone.most
        share = 1 if layout.sharded is Sharded.NOTHING else layout.num_ranks
        return base + round(max(in_window, gradients + held.step / share))

    def _trace(self, name: str, every: int, rows: int, *, is_alone: bool = False) -> Trace:
        return trace(
            self._twin,
            self._loss,
            rows=rows,
            precision=self._precisions[name],
            every=every,
            is_alone=is_alone,
        )

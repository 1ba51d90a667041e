"""Ways to a target: microbatch x accumulation x recompute x precision x deferral, with costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ..arithmetic import Line, Sharded, show_bytes
from .trace import Held, Trace

__all__ = ["Layout", "Way", "microbatches_for", "most_at", "ranked", "reason"]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that share the work.

    Attributes:
        num_ranks: How many.
        sharded: What is cut over them.
        largest_block: Bytes of the largest block that is gathered at a time, when parameters are.
    """

    num_ranks: int = 1
    sharded: Sharded = Sharded.NOTHING
    largest_block: int = 0

    def state(self, held: Held, *, defers: bool) -> list[Line]:
        """List what one rank holds between the microbatches of a window, line by line.

        Args:
            held: What one rank alone would hold.
            defers: Whether gradients are added up once a window.
        """
        share = 1 / self.num_ranks
        of_parameters = share if self.sharded is Sharded.PARAMETERS else 1.0
        is_cut = self.sharded in {Sharded.GRADIENTS, Sharded.PARAMETERS} and not defers
        of_state = 1.0 if self.sharded is Sharded.NOTHING else share
        lines = [
            Line("parameters", math.ceil(held.parameters * of_parameters)),
            Line("buffers", held.buffers),
            Line("gradients", math.ceil(held.gradients * (share if is_cut else 1.0))),
            Line("optimizer state", math.ceil(held.optimizer * of_state)),
        ]
        if self.sharded is Sharded.PARAMETERS and self.largest_block:
            lines.append(Line("gathered blocks", 2 * self.largest_block))
        if self.num_ranks > 1 and self.sharded in {Sharded.NOTHING, Sharded.OPTIMIZER}:
            lines.append(Line("all-reduce buckets", held.gradients))
        return [line for line in lines if line.num_bytes]

    def deferrals(self) -> list[bool]:
        """Give the choices there are: deferring costs memory only where gradients are cut."""
        is_choice = self.sharded in {Sharded.GRADIENTS, Sharded.PARAMETERS} and self.num_ranks > 1
        return [True, False] if is_choice else [True]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to reach the target.

    Attributes:
        rows: Of a microbatch, on one rank.
        num_microbatches: In a window, of one rank.
        precision: Of the forward, by name.
        every: Blocks that are recomputed together; 0 for none.
        defers: Whether ranks add up once a window, or after each microbatch.
        peak_bytes: Predicted, on one rank: state, gradients and the most beyond them.
        relative_time: Of an update, by operations, over one without recompute; where it was timed,
            over one of a single piece, in float32 and without recompute.
        is_timed: Whether it was timed.
        is_bound: Whether the peak is an upper bound, read between two sizes that were traced.
        fits: Whether the peak and the headroom are within the budget.
        inexact: In what its gradient is not that of the full batch in float32; empty where it is,
            up to rounding.
        why: What speaks for it, or against it.
    """

    rows: int
    num_microbatches: int
    precision: str
    every: int
    defers: bool = True
    peak_bytes: int
    relative_time: float
    is_timed: bool = False
    is_bound: bool = True
    fits: bool = True
    inexact: str = ""
    why: str = ""

    @property
    def num_rounds(self) -> int:
        """Rounds of communication in an update, where there are several ranks."""
        return 1 if self.defers else self.num_microbatches


def microbatches_for(rows: int, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
    """Cut a batch of so many rows into microbatches as even as it goes.

    Args:
        rows: Of one rank and update.
        wanted: Into how many, to choose from; None for 1, 2, 4 ... up to single rows.

    Yields:
        Rows of the largest microbatch, and how many microbatches there are.

    Example:
        >>> list(microbatches_for(12))
        [(12, 1), (6, 2), (3, 4), (2, 6), (1, 12)]
    """
    doubling = [2**power for power in range(rows.bit_length() + 1)]
    seen = set()
    for pieces in doubling if wanted is None else wanted:
        size = math.ceil(rows / pieces)
        if size not in seen:
            seen.add(size)
            yield size, math.ceil(rows / size)


def most_at(traces: Sequence[Trace], rows: int) -> float:
    """Read the most bytes at so many rows off two traces: they are nearly straight in the rows.

    A peak is the largest of several straight lines, so between two traces this is never below it.

    Args:
        traces: At different numbers of rows, ascending; exact at those.
        rows: Of the microbatch.

    Example:
        >>> most_at([Trace(1, 10), Trace(5, 50)], 3)
        30.0
    """
    exact = {trace.rows: trace.most for trace in traces}
    if rows in exact:
        return float(exact[rows])
    if len(traces) == 1:
        return traces[0].most * rows / traces[0].rows
    above = next((i for i, trace in enumerate(traces) if trace.rows >= rows), len(traces) - 1)
    one, two = traces[max(0, above - 1)], traces[max(1, above)]
    return one.most + (two.most - one.most) * (rows - one.rows) / (two.rows - one.rows)


def ranked(ways: Sequence[Way]) -> list[Way]:
    """Sort ways: those that fit first, then the faster, the exact, the fewer rounds and pieces.

    Args:
        ways: All there are.
    """

    def key(way: Way) -> tuple[object, ...]:
        if not way.fits:
            return (1, way.peak_bytes)
        return (
            0,
            round(way.relative_time, 2),
            bool(way.inexact),
            way.num_rounds,
            way.num_microbatches,
            way.peak_bytes,
        )

    return sorted(ways, key=key)


def reason(way: Way, budget: int | None, headroom: int) -> str:
    """Say what speaks for a way, or how much it is short of.

    Args:
        way: That was found.
        budget: Bytes there are; None for no limit.
        headroom: Bytes set aside.
    """
    if budget is not None and not way.fits:
        return f"{_short(way.peak_bytes + headroom - budget)} too much"
    words = [] if budget is None else [f"{_short(budget - headroom - way.peak_bytes)} to spare"]
    words.append("blocks run twice" if way.every else "nothing runs twice")
    words.append(f"not exact: {way.inexact}" if way.inexact else "exact")
    return ", ".join(words)


def _short(num_bytes: float) -> str:
    return show_bytes(num_bytes).partition(" (")[0]

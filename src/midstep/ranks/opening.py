"""Opening a window together: one small collective, and every rank knows what it is over."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence

from ..errors import WindowError
from .parallel import Parallel
from .world import World

__all__ = ["Opener", "Opening"]

# Slots for terms: what each counts, and whether any rank counts it at all.
_MOST_TERMS = 16
# Slots for how many microbatches the fullest rank has, and one for more than that.
_MOST_MARKED = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What all ranks know of a window before its first forward.

    Attributes:
        num_microbatches: Of all ranks that see different data.
        denominators: The sums of all ranks' counts; empty when streamed.
    """

    num_microbatches: int
    denominators: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """What a rank says of itself, each summed over the ranks."""

    has_cut: float
    num_microbatches: float
    is_streamed: float
    names_terms: float
    check: float
    check_squared: float
    needs_names: float
    has_too_many: float
    needs_calls: float
    asks_to_end: float

    @property
    def agrees(self) -> bool:
        """Whether all ranks read the slots alike; equal numbers have no spread."""
        is_alike = self.names_terms * self.check_squared == self.check**2
        return is_alike and not (self.needs_names and self.names_terms) and not self.has_too_many


class Opener:
    """Agrees with the other ranks on one window after the other.

    Args:
        world: The ranks.
        parallel: How they share the model.

    Attributes:
        asks_to_end: Whether this rank wants the run to end; None where nobody asks it.
        is_asked_to_end: Whether any rank wanted it when the last window was opened, so that all
            of them can end after the same one. Travels with the opening, for nothing.
    """

    def __init__(self, world: World, parallel: Parallel) -> None:
        self.asks_to_end: Callable[[], bool] | None = None
        self.is_asked_to_end = False
        self._world = world
        self._parallel = parallel
        self._copies = world.size // parallel.data_parallel_size
        self._terms: list[str] = []

    def open(
        self,
        num_microbatches: int,
        counts: Sequence[Mapping[str, float]] | None,
        *,
        has_cut: bool,
        syncs_late: bool,
        reruns: bool = False,
    ) -> Opening | None:
        """Learn what the window is on all ranks together; None when no rank has a batch left.

        One all-reduce of 336 bytes, or where ranks run in lockstep of 856, since the fullest rank
        counts. One more collective when ranks have not met a term yet that another counts, or when
        the fullest of ranks in lockstep has more than 63 microbatches.

        Args:
            num_microbatches: Of this rank.
            counts: What each of them counts, by term; None when streamed.
            has_cut: Whether this rank has a window at all.
            syncs_late: Whether gradients are added up after the last backward, not in it.
            reruns: Whether ranks may run their parts again, each by itself.

        Raises:
            WindowError: Some ranks count ahead and others stream.
        """
        own = _summed(counts or ())
        names = self._names(own)
        check = float(zlib.crc32("\n".join(names).encode()) & 0xFFFF) if names else 0.0
        said = _Head(
            has_cut=float(has_cut),
            num_microbatches=float(num_microbatches),
            is_streamed=float(counts is None),
            names_terms=float(bool(names)),
            check=check,
            check_squared=check * check,
            needs_names=float(not names),
            has_too_many=float(len(self._terms) > _MOST_TERMS),
            needs_calls=float(not num_microbatches and self._parallel.needs_calls),
            asks_to_end=float(self.asks_to_end is not None and self.asks_to_end()),
        )
        most, totals, sums, seen = self._agree(said, names, own)
        self.is_asked_to_end = totals.asks_to_end > 0
        if not totals.has_cut:
            return None
        if totals.is_streamed not in (0, self._world.size):
            raise _mixed(totals.is_streamed, self._world.size)
        self._parallel.begin(
            most + syncs_late,
            lends=bool(totals.needs_calls),
            syncs_late=syncs_late,
            reruns=reruns,
        )
        if counts is None:
            return Opening(int(self._once(totals.num_microbatches)), {})
        if totals.agrees:
            found = {name: total for name, total, n in zip(names, sums, seen, strict=False) if n}
        else:
            found = self._meet(own)
        denominators = {name: self._once(total) for name, total in found.items()}
        return Opening(int(self._once(totals.num_microbatches)), denominators)

    def _names(self, own: Mapping[str, float]) -> list[str]:
        """Name the slots: the terms met so far, those of other ranks included."""
        if not set(own) <= set(self._terms):
            self._terms = sorted({*self._terms, *own})
        if own and len(self._terms) > _MOST_TERMS:
            self._terms = sorted(own)
        return self._terms if len(self._terms) <= _MOST_TERMS else []

    def _agree(
        self, said: _Head, names: Sequence[str], own: Mapping[str, float]
    ) -> tuple[int, _Head, list[float], list[float]]:
        unused = [0.0] * (_MOST_TERMS - len(names))
        head = dataclasses.astuple(said)
        values = [*head, *(own.get(name, 0.0) for name in names), *unused]
        values += [*(float(name in own) for name in names), *unused]
        own_number = most = int(said.num_microbatches)
        is_lockstep = self._parallel.is_lockstep
        if is_lockstep:  # a sum has no largest: each rank marks its number
            marks = [0.0] * (_MOST_MARKED + 1)
            marks[min(own_number, _MOST_MARKED)] = 1.0
            values += marks
        totals = self._world.sum(values)
        if is_lockstep:
            seen = totals[-_MOST_MARKED - 1 :]
            most = max(number for number, ranks in enumerate(seen) if ranks)
            if most == _MOST_MARKED:
                most = int(max(row[0] for row in self._world.gather([float(own_number)])))
        slots = totals[len(head) : len(head) + 2 * _MOST_TERMS]
        return most, _Head(*totals[: len(head)]), slots[:_MOST_TERMS], slots[_MOST_TERMS:]

    def _meet(self, own: Mapping[str, float]) -> dict[str, float]:
        """Exchange names and counts; afterwards every rank knows every term."""
        everyone = self._world.gather_objects((self._terms, dict(own)))
        self._terms = sorted({name for names, _ in everyone for name in names})
        return _summed([counts for _, counts in everyone])

    def _once(self, total: float) -> float:
        """Count data that several ranks see alike once."""
        once = total / self._copies
        return int(once) if once == int(once) else once


def _mixed(num_streamed: float, size: int) -> WindowError:
    error = WindowError(
        f"{num_streamed:.0f} of {size} ranks stream their counts and the others count ahead, so "
        "the window has no one denominator. Call `windows(...)` with the same `count` on all ranks."
    )
    error.on_all_ranks = True
    return error


def _summed(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for counted in counts:
        for term, count in counted.items():
            found[term] = found.get(term, 0) + count
    return found

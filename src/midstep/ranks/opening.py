"""Opening a window together: one small collective, and every rank knows what it is over."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

from ..errors import WindowError
from .parallel import Parallel
from .world import World

__all__ = ["Opener", "Opening"]

_MOST_TERMS = 16
_HEAD = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What all ranks know of a window before its first forward.

    Attributes:
        num_microbatches: Of all ranks that see different data.
        denominators: The sums of all ranks' counts; empty when streamed.
    """

    num_microbatches: int
    denominators: dict[str, float]


class Opener:
    """Agrees with the other ranks on one window after the other.

    Args:
        world: The ranks.
        parallel: How they share the model.
    """

    def __init__(self, world: World, parallel: Parallel) -> None:
        self._world = world
        self._parallel = parallel
        self._copies = world.size // parallel.data_parallel_size
        self._terms: list[str] | None = None
        self._has_seen_data = False

    def open(
        self, num_microbatches: int, counts: Sequence[Mapping[str, float]] | None, *, has_cut: bool
    ) -> Opening | None:
        """Learn what the window is on all ranks together; None when no rank has a batch left.

        One all-reduce; an all-gather where ranks run in lockstep, since the fullest rank counts.
        Once, when a rank has had no batch at all, one more to learn the names of the terms.

        Raises:
            WindowError: Ranks count different terms.
        """
        own = _summed(counts or ())
        if own:
            self._terms = sorted(own)
        names = self._terms or []
        if len(names) > _MOST_TERMS:
            raise WindowError(f"{len(names)} loss terms; at most {_MOST_TERMS} travel together.")
        check = float(zlib.crc32("\n".join(names).encode()) & 0xFFFF) if names else 0.0
        self._has_seen_data = self._has_seen_data or num_microbatches > 0
        head = [
            float(has_cut),
            float(num_microbatches),
            float(bool(names)),
            check,
            check * check,
            float(not names and counts is not None),
            float(not self._has_seen_data),
        ]
        slots = [own.get(name, 0.0) for name in names] + [0.0] * (_MOST_TERMS - len(names))
        most, totals = self._agree(num_microbatches, [*head, *slots])
        if not totals[0]:
            return None
        self._check_names(totals)
        if totals[5] and totals[2]:
            known = [names for names in self._world.gather_objects(self._terms) if names]
            self._terms = known[0]
        self._parallel.begin(most, lend=bool(totals[6]) and self._parallel.is_lockstep)
        sums = totals[_HEAD:]
        denominators = {
            name: self._once(total)
            for name, total in zip(self._terms or (), sums, strict=False)
            if counts is not None
        }
        return Opening(int(self._once(totals[1])), denominators)

    def _agree(self, own: int, values: list[float]) -> tuple[int, list[float]]:
        if not self._parallel.is_lockstep:
            return own, self._world.sum(values)
        rows = self._world.gather(values)
        totals = [sum(column) for column in zip(*rows, strict=True)]
        return int(max(row[1] for row in rows)), totals

    def _check_names(self, totals: Sequence[float]) -> None:
        # Equal numbers have no spread; every rank sees the same sums, so all raise or none.
        if totals[2] * totals[4] != totals[3] ** 2:
            everyone = self._world.gather_objects(self._terms)
            raise WindowError(
                f"Ranks count different loss terms: {everyone}. Each term needs one denominator "
                "for all ranks. Give every rank the same `count`."
            )

    def _once(self, total: float) -> float:
        """Count data that several ranks see alike once."""
        once = total / self._copies
        return int(once) if once == int(once) else once


def _summed(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for counted in counts:
        for term, count in counted.items():
            found[term] = found.get(term, 0) + count
    return found

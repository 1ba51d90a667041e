"""Checks: events in, findings out. They know nothing of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ...findings import Finding, once
from ..events import Recording
from ..history import History
from .accumulation import check_accumulation
from .clearing import check_clearing
from .clipping import check_clipping
from .clocks import check_clocks
from .nonfinite import check_nonfinite
from .precision import check_precision
from .ranks import check_across_ranks, check_ranks
from .state import check_cost, check_state

__all__ = ["check"]

Seen = TypeVar("Seen")

CHECKS = (
    *(check_accumulation, check_clearing, check_clipping, check_precision, check_clocks),
    *(check_ranks, check_nonfinite, check_state, check_cost),
)


def check(recordings: Iterable[Recording]) -> list[Finding]:
    """Find the defects in what one or many processes did, each once a line.

    A check that fails is left out with a warning: whoever trained for a night gets what the others
    found.

    Args:
        recordings: One for each process.

    Warns:
        RuntimeWarning: A check failed.

    Example:
        >>> check([Recording([])])
        []
    """
    return once(_all(list(recordings)))


def _all(recordings: list[Recording]) -> Iterator[Finding]:
    for launch in launches(recordings):
        histories = [History(recording) for recording in launch]
        for history in histories:
            for one in CHECKS:
                yield from _tried(one, history)
        yield from _tried(check_across_ranks, histories)


def _tried(one: Callable[[Seen], Iterable[Finding]], seen: Seen) -> Iterator[Finding]:
    try:
        yield from one(seen)
    except Exception as error:  # noqa: BLE001 - whatever is wrong in a check
        name = getattr(one, "__name__", "a check")
        warnings.warn(
            f"`{name}` of the audit failed ({type(error).__name__}: {error}), so what it looks for "
            "may be there and not be told. The training is as it was. It is a fault of midstep: "
            "please report it.",
            RuntimeWarning,
            stacklevel=2,
        )


def launches(recordings: list[Recording]) -> list[list[Recording]]:
    """Put the processes that trained together side by side, in order of their rank.

    Args:
        recordings: Of several launches, as one script may make them.
    """
    groups: list[list[Recording]] = []
    for recording in sorted(recordings, key=lambda r: r.started):
        for group in groups:
            is_same = group[0].world_size == recording.world_size
            if is_same and recording.rank not in {other.rank for other in group}:
                group.append(recording)
                break
        else:
            groups.append([recording])
    return [sorted(group, key=lambda r: r.rank) for group in groups]

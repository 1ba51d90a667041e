"""What `midstep train` observes: a cheap set in any case, everything when asked to."""

from __future__ import annotations

import sys

from ..observers import (
    Entries,
    GradNorms,
    Memory,
    Microbatches,
    Moments,
    NoiseScale,
    Observer,
    Stages,
    Updates,
)

__all__ = ["default_observers", "every_observer"]


def default_observers() -> list[Observer]:
    """Give those that cost less than a hundredth of an update of a small model."""
    return [Stages(), *_memory(every=10), GradNorms(every=10), Updates(every=10)]


def every_observer(*, unit: str = "targets") -> list[Observer]:
    """Give all of them, at every update.

    Args:
        unit: What the recipe's count counts.
    """
    return [
        Stages(),
        *_memory(every=1),
        GradNorms(),
        Entries(),
        Updates(),
        Moments(),
        Microbatches(),
        NoiseScale(unit=unit),
    ]


def _memory(*, every: int) -> list[Observer]:
    """Windows does not tell what a process has resident."""
    return [] if sys.platform == "win32" else [Memory(every=every)]

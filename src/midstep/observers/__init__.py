"""Observers: what else the record of an update can tell, at a stated cost, every n updates.

Passed as `Updater(observers=[...])`. Without any, and in updates that are not due, nothing is
hooked, nothing is read and nothing is computed. What lies on an accelerator stays there until the
record is read or written.
"""

from .entries import Entries
from .machine import Memory, Stages
from .microbatches import Microbatches
from .moments import Moments
from .noise import NoiseScale
from .norms import GradNorms
from .observer import Observer, Reading
from .updates import Updates

__all__ = [
    "Entries",
    "GradNorms",
    "Memory",
    "Microbatches",
    "Moments",
    "NoiseScale",
    "Observer",
    "Reading",
    "Stages",
    "Updates",
]

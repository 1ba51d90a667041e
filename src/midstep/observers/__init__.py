"""Observers: what else the record of an update can tell, at a stated cost, every n updates.

Passed as `Updater(observers=[...])`. Without any, and in updates that are not due, nothing is
hooked, nothing is read and nothing is computed. What lies on an accelerator stays there until the
record is read or written.
"""

from .norms import GradNorms
from .observer import Observer, Reading

__all__ = ["GradNorms", "Observer", "Reading"]

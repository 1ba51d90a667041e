"""Reading: a run's log in, columns out, whoever wrote it.

midstep's own folders, CSV, JSON lines, TensorBoard event files and the `trainer_state.json` of
Transformers. Which of a foreign log's columns is which is guessed from its name, or told.
"""

from __future__ import annotations

from .source import ReportError, read

__all__ = ["ReportError", "read"]

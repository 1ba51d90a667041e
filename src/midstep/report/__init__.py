"""The report: what happened to a run, as a page, as pictures, and as a verdict in words.

    records or another tool's log -> columns (`reading`) -> findings (`verdict`) -> page (`page`)

It reads what a run left and nothing else: no model, no torch. `midstep report` is its command.
"""

from __future__ import annotations

from .reading import read
from .run import Run
from .verdict import Finding, Judgement, judge

__all__ = ["Finding", "Judgement", "Run", "judge", "read"]

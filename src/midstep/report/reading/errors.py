"""What cannot be read."""

from __future__ import annotations

from ...errors import MidstepError

__all__ = ["ReportError"]


class ReportError(MidstepError):
    """A log that holds no run, or not the columns that were asked for."""

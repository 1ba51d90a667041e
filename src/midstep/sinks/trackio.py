"""Records for trackio."""

from __future__ import annotations

from typing import Any

from ..records import UpdateRecord
from .missing import imported
from .scalars import scalars_of

__all__ = ["Trackio"]


class Trackio:
    """Log each record to a run of trackio, at the number of the update.

    Names are those of `scalars_of`, whose sections trackio shows as groups of plots.

    Args:
        run: What `trackio.init(...)` returned.

    Raises:
        ImportError: trackio is not installed: `pip install 'midstep[trackio]'`.
        TypeError: It is no run.
    """

    def __init__(self, run: Any) -> None:
        imported("trackio", "Trackio", "trackio")
        if not callable(getattr(run, "log", None)):
            raise TypeError(
                f"`Trackio({run!r})`: is no run, so there is nothing to log to. Pass what "
                "`trackio.init(...)` returned."
            )
        self._run = run

    def __call__(self, record: UpdateRecord) -> None:
        """Log one record; trackio writes it from a thread of its own."""
        self._run.log(scalars_of(record), step=record.update)

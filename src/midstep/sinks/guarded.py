"""Guarded: no sink is worth a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..records import UpdateRecord

__all__ = ["Guarded"]


class Guarded:
    """A sink that warns once when it fails, and then no more; a log is not worth a run.

    Args:
        sink: Anything that can be called with a record.
    """

    def __init__(self, sink: Callable[[UpdateRecord], None]) -> None:
        self.sink = sink
        self._has_failed = False

    def __call__(self, record: UpdateRecord) -> None:
        """Pass a record on."""
        try:
            self.sink(record)
        except Exception as error:  # noqa: BLE001 - whatever a sink does, the run goes on
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"The sink `{self.sink!r}` failed with `{error!r}` at update {record.update}. "
                    "The run goes on; this sink's log has a gap.",
                    RuntimeWarning,
                    stacklevel=3,
                )

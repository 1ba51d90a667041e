"""Records for MLflow."""

from __future__ import annotations

import time
from typing import Any

from ..records import UpdateRecord
from .missing import imported
from .scalars import scalars_of

__all__ = ["MLflow"]

# What MLflow takes in the name of a metric beside letters and digits, and metrics in one call.
_ALLOWED = frozenset("_-. /")
_MOST = 1_000


class MLflow:
    """Log each record to a run of MLflow, as metrics at the number of the update.

    Names are those of `scalars_of`; what MLflow does not take in a name becomes `_`. One call an
    update, which waits for the tracking server.

    Args:
        run_id: Of the run; None for the one that `mlflow.start_run()` made active.

    Raises:
        ImportError: mlflow is not installed: `pip install 'midstep[mlflow]'`.
        ValueError: No run is given, and none is active.
    """

    def __init__(self, run_id: str | None = None) -> None:
        mlflow: Any = imported("mlflow", "MLflow", "mlflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise ValueError(
                "`MLflow()`: no run is active, so there is nothing to log to. Call "
                "`mlflow.start_run()` first, or pass `run_id`."
            )
        self._run_id: str = active.info.run_id if run_id is None else run_id
        self._client: Any = mlflow.MlflowClient()
        self._metric: Any = imported("mlflow.entities", "MLflow", "mlflow").Metric

    def __call__(self, record: UpdateRecord) -> None:
        """Log one record."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._metric(_spelt(name), value, now, record.update)
            for name, value in scalars_of(record).items()
        ]
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST])


def _spelt(name: str) -> str:
    return "".join(c if (c.isascii() and c.isalnum()) or c in _ALLOWED else "_" for c in name)

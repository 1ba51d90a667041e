"""Sinks: where records go. A sink is anything that can be called with a record.

Passed as `Updater(sinks=[...])`; on several ranks give them to rank 0 alone, where one log is
enough. A sink that fails warns once and never stops the run. Those for other tools import them when
they are made, so that nothing here needs any of them.
"""

from .guarded import Guarded
from .jsonl import JsonLines
from .mlflow import MLflow
from .openmetrics import OpenMetrics
from .scalars import scalars_of
from .tensorboard import TensorBoard
from .trackio import Trackio
from .wandb import WandB

__all__ = [
    "Guarded",
    "JsonLines",
    "MLflow",
    "OpenMetrics",
    "TensorBoard",
    "Trackio",
    "WandB",
    "scalars_of",
]

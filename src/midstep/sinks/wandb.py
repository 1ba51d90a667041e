"""Records for Weights & Biases."""

from __future__ import annotations

from typing import Any

from ..records import UpdateRecord
from .missing import imported
from .scalars import scalars_of

__all__ = ["WandB"]


class WandB:
    """Log each record to a run of Weights & Biases, online or offline as the run is.

    Names are those of `scalars_of`; the x axis is `update`, defined as the step metric of all of
    them, so that other things may be logged to the same run at steps of their own.

    Args:
        run: What `wandb.init(...)` returned; None for the run that is active.

    Raises:
        ImportError: wandb is not installed: `pip install 'midstep[wandb]'`.
        ValueError: No run is given, and none is active.
    """

    def __init__(self, run: Any = None) -> None:
        wandb = imported("wandb", "WandB", "wandb")
        self._run: Any = wandb.run if run is None else run
        if self._run is None:
            raise ValueError(
                "`WandB()`: no run is active, so there is nothing to log to. Call "
                "`wandb.init(...)` first, and pass what it returns."
            )
        self._defined: set[str] = set()

    def __call__(self, record: UpdateRecord) -> None:
        """Log one record."""
        scalars = scalars_of(record)
        sections = {name.partition("/")[0] for name in scalars} - self._defined
        if not self._defined:
            self._run.define_metric("update", hidden=True)
        for section in sorted(sections):
            self._run.define_metric(f"{section}/*", step_metric="update")
        self._defined |= sections
        self._run.log({"update": record.update, **scalars})

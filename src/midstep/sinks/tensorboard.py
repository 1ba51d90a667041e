"""Records for TensorBoard."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from ..records import UpdateRecord
from .missing import imported
from .scalars import scalars_of

__all__ = ["TensorBoard"]


class TensorBoard:
    """Write each record as scalars of an event file; `tensorboard --logdir FOLDER` shows them.

    Tags are those of `scalars_of`, so that `train/...` is one group and each thing that is measured
    by tensor another; the x axis is the number of the update.

    Args:
        folder: Of the event file; made if it is missing. A run that goes on makes a second file
            beside the first, which TensorBoard joins.

    Raises:
        ImportError: tensorboard is not installed: `pip install 'midstep[tensorboard]'`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        imported("tensorboard", "TensorBoard", "tensorboard")
        module = imported("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._writer: Any = module.SummaryWriter(os.fspath(folder))

    def __call__(self, record: UpdateRecord) -> None:
        """Write one record; the writer puts it on disk within two minutes, or when it is closed."""
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, global_step=record.update)

    def close(self) -> None:
        """Put everything on disk and close the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

"""Automatic rows: how large a microbatch is tried, and what is learnt when it does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from .errors import MidstepError

__all__ = ["AutoRows", "Fit", "is_out_of_memory"]

# How allocators say it that have no class for it: torch's own on a CPU, MPS, and the libraries.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "could not create a memory object",
    "std::bad_alloc",
)


@dataclasses.dataclass(frozen=True, slots=True)
class AutoRows:
    """Have each batch cut into microbatches as large as the memory allows, found while training.

    An out-of-memory error anywhere in a window puts back random state and buffers, drops what the
    window accumulated, halves the microbatch and runs the window again: the gradient is the one
    that enough memory would have given, no row is lost or used twice, and there is one step. The
    size is kept, saved with the updater, and doubled again after a while without an error; every
    error doubles that while. Given as `windows(rows=ms.AutoRows())`, for `Updater.update`.

    A step that runs out of memory is finished without the writes it had made, so that it needs no
    copy; see `guards_step` for where that cannot be.

    Costs a copy of the model's buffers a window. On several ranks each finds its own size, and
    gradients are added up after the last backward instead of in it.

    Attributes:
        first: Rows to begin with; None for the whole batch.
        grow_after: Windows without an error before the next larger size is tried; None for never.
        guards_step: Copy weights and optimizer state before each step, so that an error in the
            middle of one is taken back. Costs the memory of both within the step, and a pass. For
            optimizers that are not torch's own, whose kernels may write what torch does not see,
            and for Adadelta, Adafactor and ASGD: without it an error in their step may end the run.

    Raises:
        TypeError: A number is not whole, or `guards_step` not a truth value.
        ValueError: A number is below 1.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for window in updater.windows([torch.ones(64, 2)], rows=ms.AutoRows(), count=len):
        ...     record = updater.update(window, lambda model, x: model(x).sum())
        >>> record.num_microbatches, record.applied
        (1, True)
    """

    first: int | None = None
    grow_after: int | None = 100
    guards_step: bool = False

    def __post_init__(self) -> None:
        numbers = [value for value in (self.first, self.grow_after) if value is not None]
        wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int)]
        if wrong or not isinstance(self.guards_step, bool):
            raise TypeError(
                f"`{self}`: `first` and `grow_after` are whole numbers or None, `guards_step` is "
                "True or False."
            )
        if min(numbers, default=1) < 1:
            raise ValueError(
                f"`{self}`: a microbatch has at least 1 row, and a larger one is tried after at "
                "least 1 window. Pass None for the default of `first`, or to never grow."
            )


class Fit:
    """The size that fits, as far as it is known.

    Attributes:
        rows: Of a microbatch; None while the whole batch fits.
    """

    __slots__ = ("_num_good", "_wait", "rows")

    def __init__(self) -> None:
        self.rows: int | None = None
        self._num_good = 0
        self._wait = 1  # times `grow_after`

    def rows_for(self, total: int, auto: AutoRows) -> int:
        """Give the size to try on a batch of so many rows."""
        known = self.rows if self.rows is not None else auto.first
        return total if known is None else min(known, total)

    def shrink(self, rows: int) -> int:
        """Note that so many rows did not fit, and give half of them."""
        self.rows = -(-rows // 2)
        self._num_good = 0
        self._wait *= 2
        return self.rows

    def note_good(self, total: int, auto: AutoRows) -> None:
        """Note a window that fitted; after enough of them the next tries twice the rows."""
        rows = self.rows_for(total, auto)
        if auto.grow_after is None or rows >= total:
            return
        self._num_good += 1
        if self._num_good >= self._wait * auto.grow_after:
            self._num_good = 0
            self.rows = 2 * rows

    def state_dict(self) -> dict[str, Any]:
        """Give it as plain numbers."""
        return {"rows": self.rows, "num_good": self._num_good, "wait": self._wait}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what an earlier run has found."""
        self.rows = state["rows"]
        self._num_good = state["num_good"]
        self._wait = state["wait"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left.

    Args:
        error: Of torch, of Python, or of a library that has no class for it.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, MidstepError):  # which may quote such an error of another rank
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)

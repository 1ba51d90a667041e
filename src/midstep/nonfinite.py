"""Policies: what to do with a window that cannot be stepped on.

Two answers. `Raise` stops the run before anything is touched; `Skip` records the window and goes
on, for so many in a row. The same two serve a gradient that is not finite and a window without
targets.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

__all__ = ["Policy", "Raise", "Skip"]


class Policy(Protocol):
    """Whether to go on after a window that cannot be stepped on."""

    @property
    def every_microbatch(self) -> bool:
        """Whether to look at the gradients after each backward, to know who broke them."""
        ...

    def goes_on(self, skipped_in_a_row: int, *, explained: bool) -> bool:
        """Decide.

        Args:
            skipped_in_a_row: How many windows before this one were skipped in a row.
            explained: Whether the loss scale alone can have caused it, and has backed off.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Raise:
    """Raise on the first window that cannot be stepped on; nothing was touched.

    The error names the parameters, the number of entries and the microbatch. Which microbatch it
    was shows in its loss; where every loss was finite, `Updater.update` runs the window's
    microbatches again, one by one and with the same random draws, to find it.

    Attributes:
        every_microbatch: Look after each backward, for loops of one's own, whose microbatches
            cannot be run again. Costs one read of the gradients a microbatch; on an accelerator a
            host sync.

    Example:
        >>> Raise().goes_on(skipped_in_a_row=0, explained=False)
        False
    """

    every_microbatch: bool = False

    def goes_on(self, skipped_in_a_row: int, *, explained: bool) -> bool:
        """Only past an overflow that belongs to the search for the loss scale."""
        return explained


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """Skip a window that cannot be stepped on: no step, no schedule tick, no trace but its record.

    Attributes:
        max_consecutive: How many in a row are skipped before the next one raises after all; None
            for any number.
        every_microbatch: As in `Raise`.

    Raises:
        ValueError: `max_consecutive` is below 1.

    Example:
        >>> policy = Skip(max_consecutive=2)
        >>> [policy.goes_on(n, explained=False) for n in (0, 1, 2)]
        [True, True, False]
    """

    max_consecutive: int | None = None
    every_microbatch: bool = False

    def __post_init__(self) -> None:
        limit = self.max_consecutive
        is_whole = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and not (is_whole and limit >= 1):
            raise ValueError(
                f"`Skip(max_consecutive={limit!r})`: must be a whole number of at least 1, or "
                "None for no limit. To stop at the first, use `Raise()`."
            )

    def goes_on(self, skipped_in_a_row: int, *, explained: bool) -> bool:
        """Go on until `max_consecutive` were skipped in a row; past what is explained anyway."""
        return explained or self.max_consecutive is None or skipped_in_a_row < self.max_consecutive

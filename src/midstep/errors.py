"""What can go wrong, grouped by who must act.

A class of its own exists only where a caller would act differently on it, and it carries the data
that the action needs. Wrong arguments stay `ValueError` and `TypeError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "CheckpointError",
    "CountMismatch",
    "EmptyWindow",
    "MidstepError",
    "NonFiniteGradient",
    "NotAgreed",
    "OutOfMemory",
    "RankFailure",
    "RecipeError",
    "ReplicaDrift",
    "WindowError",
]


class MidstepError(Exception):
    """The base of every error midstep raises on its own account.

    Attributes:
        on_all_ranks: Whether every rank raises it at the same place, so that all of them may go on
            from there. Any other error ends the run on every rank.

    Example:
        >>> issubclass(EmptyWindow, MidstepError)
        True
    """

    on_all_ranks: bool = False


class WindowError(MidstepError, RuntimeError):
    """A window was used in a way that would make its gradient something else than promised.

    The window is dropped: its gradients are cleared, nothing was stepped and no clock ticked.

    Example:
        >>> raise WindowError("`window.step()`: no backward ran in this window.")
        Traceback (most recent call last):
        ...
        midstep.errors.WindowError: `window.step()`: no backward ran in this window.
    """


class EmptyWindow(WindowError):
    """A whole window, on every rank, holds nothing to take the mean over.

    Example:
        >>> issubclass(EmptyWindow, WindowError)
        True
    """


class CountMismatch(WindowError):
    """A loss says it is a sum over one number of targets and the window counted another.

    Attributes:
        term: The loss term that disagrees.
        counted: What the window's `count` found.
        carried: What the loss itself says.

    Example:
        >>> CountMismatch("they differ", term="loss", counted=7, carried=6).counted
        7
    """

    def __init__(self, message: str, *, term: str, counted: float, carried: float) -> None:
        super().__init__(message)
        self.term = term
        self.counted = counted
        self.carried = carried


class NonFiniteGradient(MidstepError, RuntimeError):
    """A gradient holds inf or nan; weights, optimizer state and schedule are as they were.

    Attributes:
        parameters: Number of non-finite entries by parameter name, only those that have any.
        num_nonfinite: Their sum.
        microbatch: Position in its window of the microbatch that brought them, from 0; None where
            it is not known.
        update: The attempt, counted from 1; None outside an `Updater`.
        rank: Whose microbatch it was; None on one rank alone, or where it is not known.

    Example:
        >>> error = NonFiniteGradient("bad", parameters={"weight": 2}, microbatch=1, update=7)
        >>> error.num_nonfinite, error.microbatch
        (2, 1)
    """

    def __init__(
        self,
        message: str,
        *,
        parameters: Mapping[str, int],
        microbatch: int | None = None,
        update: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameters = dict(parameters)
        self.num_nonfinite = sum(self.parameters.values())
        self.microbatch = microbatch
        self.update = update


class OutOfMemory(MidstepError, MemoryError):
    """Nothing smaller is left to try, or a step was broken off half-way.

    Example:
        >>> issubclass(OutOfMemory, MemoryError)
        True
    """


class NotAgreed(MidstepError):
    """Some rank could not go on in a window that all of them may run again.

    Raised on all ranks alike and answered within; none of it reaches a caller.

    Example:
        >>> NotAgreed.on_all_ranks
        True
    """

    on_all_ranks = True


class RankFailure(MidstepError, RuntimeError):
    """Another rank failed inside a window, which no rank can finish without it.

    Attributes:
        rank: The one that failed first; None where it is not known.
        is_lost: Whether it is gone without a word, so that its process has said nothing either.

    Example:
        >>> RankFailure("Rank 1 failed: ValueError: bad batch.", rank=1).rank
        1
    """

    def __init__(self, message: str, *, rank: int | None, is_lost: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.is_lost = is_lost


class ReplicaDrift(MidstepError, RuntimeError):
    """Ranks that must hold the same weights hold different ones; the majority tells which drifted.

    Attributes:
        ranks: Those that differ from most; where there is no majority, from the lowest rank.
        parameter: The first one that differs.

    Example:
        >>> ReplicaDrift("Rank 2 has drifted.", ranks=[2], parameter="head.weight").ranks
        [2]
    """

    on_all_ranks = True

    def __init__(self, message: str, *, ranks: Sequence[int], parameter: str) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.parameter = parameter


class CheckpointError(MidstepError, RuntimeError):
    """A checkpoint could not be written or does not fit; nothing was changed by the attempt.

    Example:
        >>> issubclass(CheckpointError, MidstepError)
        True
    """


class RecipeError(MidstepError):
    """A recipe could not be found, read or built.

    Example:
        >>> issubclass(RecipeError, MidstepError)
        True
    """

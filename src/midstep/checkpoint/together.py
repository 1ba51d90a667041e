"""Together: what every rank does, and all of them fail at when one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import CheckpointError, MidstepError
from ..ranks import Ranks

__all__ = ["cause_of", "joint_error", "together"]

T = TypeVar("T")


def together(ranks: Ranks | None, step: Callable[[], T]) -> T:
    """Do something on every rank; where it fails on any of them, all raise, and alike.

    One small collective; none on one rank alone.

    Args:
        ranks: The other ranks; None where there are none.
        step: What to do. It must not need another rank.

    Raises:
        CheckpointError: It failed on some ranks; what it failed with when all fail alike.
        RankFailure: A rank is gone.
    """
    if ranks is None:
        return step()
    found: list[T] = []
    failure: Exception | None = None
    with ranks.failing():
        try:
            found.append(step())
        except Exception as error:  # noqa: BLE001 - it is raised below, on every rank
            failure = error
        said = None if failure is None else (type(failure).__name__, str(failure))
        everyone = ranks.world.gather_objects(said)
    if any(everyone):
        if failure is not None and len(set(everyone)) == 1:
            if isinstance(failure, MidstepError):
                failure.on_all_ranks = True
            raise failure
        raise joint_error(everyone) from failure
    return found[0]


def joint_error(everyone: Sequence[tuple[str, str] | None]) -> CheckpointError:
    """Make one error for all ranks out of what failed on some.

    Args:
        everyone: Kind and message of each rank's own error, None where all went well.
    """
    failed = [(rank, *said) for rank, said in enumerate(everyone) if said is not None]
    first, kind, message = failed[0]
    others = f" (and on {', '.join(str(rank) for rank, _, _ in failed[1:])})"
    what = message if kind == CheckpointError.__name__ else f"{kind}: {message}"
    error = CheckpointError(f"On rank {first}{others * (len(failed) > 1)}: {what}")
    error.on_all_ranks = True
    return error


def cause_of(error: BaseException) -> str:
    """Give the first line of what an error says."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__

"""Layout: over how many ranks a run is spread, and what of it means nothing on another number.

Random streams belong to a rank, and so does the order in which its loader reads. On another number
of ranks the streams are left as they are, and the pass over the data goes on from the number of
batches that all ranks together have used.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..ranks import Ranks
from ..snapshot import RandomState

__all__ = ["Layout", "Progress", "moved"]


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far into its pass one rank is.

    Attributes:
        num_batches: Used in this pass.
        generators: Mark of the states its loader's generators had when the pass began.
        random: Mark of the random state the pass began with.
    """

    num_batches: int
    generators: str
    random: str

    @classmethod
    def of(cls, cursor: Mapping[str, Any] | None) -> Progress:
        """Read it off a saved place in the data."""
        start = None if cursor is None else cursor["start"]
        if cursor is None or start is None:
            return cls(0, "", "")
        return cls(cursor["num_batches"], _digest(start["generators"]), _digest(start["random"]))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Over how many ranks a run is spread.

    Attributes:
        num_ranks: All of them.
        data_parallel_size: Those that see different data.
    """

    num_ranks: int
    data_parallel_size: int

    @classmethod
    def of(cls, ranks: Ranks | None) -> Layout:
        """Give that of a run; 1 and 1 for one process."""
        if ranks is None:
            return cls(1, 1)
        return cls(ranks.world.size, ranks.parallel.data_parallel_size)


def moved(
    path: Path,
    cursor: Mapping[str, Any] | None,
    progress: Sequence[Progress],
    saved: Layout,
    ours: Layout,
) -> dict[str, Any] | None:
    """Give the place in the data on another number of ranks; None to begin a pass.

    All ranks together have used `num_batches * data_parallel_size` batches, and each of the new
    ones goes on as if it had used its share. For ranks that take turns in one order, as with
    `DistributedSampler`, no row is left out or seen twice. Where every rank reads the whole order,
    the place is that of all of them as it is.

    Args:
        path: Of the checkpoint, for what is said of it.
        cursor: The place of the first rank.
        progress: Of every rank.
        saved: Over how many ranks the run was spread.
        ours: Over how many it is now.

    Raises:
        CheckpointError: A loader kept its own place, ranks had used different numbers of batches,
            or the number of all does not divide.
    """
    if cursor is not None and cursor.get("is_shared"):
        return dict(cursor)
    if cursor is None or cursor["start"] is None:
        return None
    counts = [each.num_batches for each in progress]
    where = (
        f"`{path}` was saved inside a pass over the data on {saved.data_parallel_size} ranks that "
        f"see different data, and there are {ours.data_parallel_size} now"
    )
    how = (
        f"Nothing was changed. Resume on {saved.num_ranks} ranks, or from a checkpoint that was "
        "saved between two passes."
    )
    if cursor["loader"] is not None:
        raise CheckpointError(
            f"{where}. A stateful loader kept the place, which is that of one rank's share and "
            f"means nothing in another. {how}"
        )
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"{where}. The ranks had used {counts} batches, so what they had read together is no "
            f"beginning of one order. {how}"
        )
    used = counts[0] * saved.data_parallel_size
    if used % ours.data_parallel_size:
        raise CheckpointError(
            f"{where}. They had used {used} batches together, which is no whole number for each: "
            f"some rows would be left out or seen twice. {how}"
        )
    return {
        "num_batches": used // ours.data_parallel_size,
        "is_ahead": False,
        "is_over": False,
        "length": None,
        "start": _start(cursor["start"], progress, saved),
        "generators": [],
        "loader": None,
    }


def _start(start: Mapping[str, Any], progress: Sequence[Progress], saved: Layout) -> dict[str, Any]:
    """What the order of the pass is replayed from: what all ranks shared, else what is here.

    A stream that one rank had for itself is given to none, or all would read in one order.
    """
    several = saved.data_parallel_size > 1
    shares_generators = several and len({each.generators for each in progress}) == 1
    shares_random = several and len({each.random for each in progress}) == 1
    return {
        "random": start["random"] if shares_random else RandomState.capture().state_dict(),
        "generators": start["generators"] if shares_generators else [],
    }


def _digest(value: object) -> str:
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _feed(digest, item)
    elif isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())

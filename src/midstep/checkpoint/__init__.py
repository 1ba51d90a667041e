"""Checkpoints: a run saved at a window boundary, whole or not at all, and the way back into it.

The continued run is the uninterrupted run, bit for bit: model, optimizer, schedule, loss scale,
clip statistics, clocks, random streams and the place in the data all return. One rank saves a file
of plain values and tensors, several save a folder together, and either is read by any number of
ranks. Nothing of it is unpickled but what is known to hold no code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..updater import Updater
from .content import content_of, ranks_of
from .file import write_file
from .replacing import whole_at
from .resuming import content_for, take
from .together import together

__all__ = ["load", "save"]


def save(
    path: str | os.PathLike[str], updater: Updater, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Save a run between two windows; on several ranks, all of them call it.

    Written beside `path`, synced to disk and renamed, so that a kill at any moment, of one rank or
    all, leaves either the old checkpoint or the new one. Costs a write of weights and optimizer
    state, and with a stateful loader its own state. On several ranks each writes its share of them
    into a folder of the format of `torch.distributed.checkpoint`, which must be on a file system
    that all of them see.

    Args:
        path: The file, or on several ranks the folder; the folder around it is made.
        updater: Whose run it is.
        extra: More to keep: plain values and tensors. `load` gives it back, to each rank its own.

    Raises:
        CheckpointError: It cannot be written, on this rank or another; what was saved before is
            whole.
        WindowError: Inside a window.
        TypeError: A state holds something that a safe load could not read back.
        RankFailure: A rank is gone; what was saved before is whole, or what was to be saved.

    Example:
        >>> import midstep as ms, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(model, torch.optim.AdamW(model.parameters()))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Path(folder) / "checkpoint.pt", updater, extra={"note": "first"})
        ...     load(Path(folder) / "checkpoint.pt", updater)
        {'note': 'first'}
    """
    path, ranks = Path(path), ranks_of(updater)
    if ranks is not None:
        ranks.world.check()
    content = together(ranks, lambda: content_of(updater, extra))
    if ranks is None:
        write_file(path, content)
    elif ranks.world.size == 1:
        from .one_file import made_whole

        write_file(path, made_whole(content))
    else:
        from .folder import write_folder  # a second's worth of torch

        write_folder(path, content, ranks)


def load(path: str | os.PathLike[str], updater: Updater) -> dict[str, Any]:
    """Go on from a saved run, on as many ranks or another number; all of them call it.

    Everything is checked before anything is changed. Afterwards the next `updater.windows(loader,
    ...)` reads on at the saved place. Costs host memory of what this rank holds: weights and
    optimizer state, whole or in shards.

    Replicated, sharded and split models read each other's checkpoints. On as many ranks, and as
    many that see different data, the run goes on bit for bit, as far as the collectives add in the
    same order. On another number

    - weights, optimizer state, schedule, clocks, loss scale and clip statistics return;
    - the random streams are left as they are here, for each belongs to a rank that is no more;
    - the pass over the data goes on from the number of batches that all ranks together had used,
      which leaves no row out where ranks take turns in one order (`DistributedSampler`); it is an
      error where that number does not divide, or a stateful loader kept the place;
    - buffers of which each rank had its own, and `extra`, are those of the first rank.

    Args:
        path: What `save` wrote.
        updater: Made as the saved one was: same model, optimizer, precision, clip rule, schedule.

    Returns:
        The `extra` it was saved with.

    Raises:
        CheckpointError: There is none, it cannot be read, or it is of another model, optimizer,
            precision, rule, schedule or schema, on this rank or another. Nothing was changed.
        RankFailure: A rank is gone.

    Example:
        >>> import midstep as ms, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters()))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Path(folder) / "checkpoint.pt", updater)
        ...     load(Path(folder) / "checkpoint.pt", updater)
        {}
    """
    path, ranks = Path(path), ranks_of(updater)
    found = whole_at(path)
    if ranks is not None:
        ranks.world.check()
        with ranks.failing():
            found = ranks.world.gather_objects(found)[0]  # one may see it renamed meanwhile
    place = path if found is None else found
    content = together(ranks, lambda: content_for(place, updater))
    take(place, updater, content)
    extra: dict[str, Any] = content["extra"]
    return extra

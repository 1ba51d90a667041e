"""Watching: every part installed around a block, and torch restored after it, whatever happened."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from torch.autograd import graph
from torch.optim import Optimizer

from .clipping import watch_clips
from .clocks import watch_loaders, watch_schedules
from .core import Recorder
from .parallel import watch_ranks
from .places import Places
from .state import watch_modules, watch_reads, watch_recompute, watch_state
from .stepping import watch_optimizers, watch_scalers

__all__ = ["watch"]

PARTS = (
    *(watch_optimizers, watch_scalers, watch_clips, watch_schedules, watch_loaders),
    *(watch_ranks, watch_modules, watch_recompute, watch_state, watch_reads),
)


@contextlib.contextmanager
def watch(
    *, own: tuple[str, ...] = (), max_updates: int | None = None, find_optimizers: bool = True
) -> Iterator[Recorder]:
    """Watch everything that runs in a `with` block.

    Costs two attribute reads a parameter and backward, and a walk over the scalar part of each
    loss. Reads values of three small samples an optimizer, at first always and later within a
    fiftieth of the time. No random number is drawn and no gradient changed.

    Args:
        own: Folders and files that are the user's although they lie among the libraries.
        max_updates: Let go after so many steps; None to watch to the end.
        find_optimizers: Look for optimizers that were made before; without any, that is time lost.

    Returns:
        A context that gives the recorder.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with watch(find_optimizers=False) as recorder:
        ...     model(torch.ones(3, 2)).mean().backward()
        >>> [type(event).__name__ for event in recorder.events]
        ['Backward']
    """
    recorder = Recorder(Places(own), max_updates)

    def watch_backward(original: Any) -> Any:
        def _engine_run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.backward(original, tensors, *args, **kwargs)

        return _engine_run_backward

    recorder.patches.function(graph._engine_run_backward, watch_backward)  # noqa: SLF001
    try:
        for part in PARTS:
            part(recorder)
        recorder.patches.install()
        recorder.is_watching = True
        for thing in gc.get_objects() if find_optimizers else ():
            # Asked of its type: `isinstance` would wake lazy objects.
            if issubclass(type(thing), Optimizer) and hasattr(thing, "param_groups"):
                recorder.know(thing)
        yield recorder
    finally:
        recorder.let_go()
        recorder.patches.restore()

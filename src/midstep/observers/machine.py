"""What an update takes of the machine: memory, and time by stage."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ..gradients import Gradients
from .observer import Observer, OpenWindow, Reading, Subject

__all__ = ["Memory", "Stages"]


class Memory(Observer):
    """Add the most memory that was held so far, on this rank.

    Field: `memory_bytes` x. On an accelerator the peak of what torch has allocated there since the
    process began, or since its peak was last reset; else the peak of what the process had resident
    in host memory. It never falls, so what rises is what to look at.

    Costs some 20 microseconds; no host sync.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Raises:
        NotImplementedError: (when the updater is made) The model is in host memory, and the system
            (Windows) does not tell what is resident.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Memory()])
        >>> record = updater.update(
        ...     [torch.ones(1, 2)], lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["memory_bytes"] > 10_000_000
        True
    """

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._peak: Callable[[], int] = _peak_resident
        self._most = 0

    def attach(self, subject: Subject) -> None:
        """Find out where the memory is.

        Raises:
            NotImplementedError: In host memory, on a system that does not tell.
        """
        device = device_of(subject)
        if device.type != "cpu":
            self._peak = lambda: int(torch.accelerator.max_memory_allocated(device))
        elif sys.platform == "win32":
            raise NotImplementedError(
                "`Memory()`: Windows does not tell the standard library what a process has "
                "resident. Leave this observer out."
            )

    def read(self) -> Iterable[Reading]:
        """Ask the system."""
        # Linux counts by thread, and sums up late.
        self._most = peak = max(self._most, self._peak())
        yield Reading((), lambda _: {"memory_bytes": peak})


class Stages(Observer):
    """Add the time that each stage of an update took.

    Field: `stage_seconds` {"data", "forward", "backward", "measure", "step"}. *Data* is waiting for
    batches, and counting them; *forward* goes from a batch to its backward, whatever the loop does
    between; *measure* from the last backward through sum over ranks, norm and clip rule; *step* the
    optimizer. Together they are `seconds`, but for what comes after the step. A skipped update has
    no step.

    Costs a microsecond a microbatch. On an accelerator the times are those of the device, between
    events that are recorded there, so that nothing waits; a stage that the device spends idle
    counts in full.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Stages()])
        >>> record = updater.update(
        ...     [torch.ones(1, 2)], lambda model, x: model(x).sum(), count=ms.rows())
        >>> list(record.extra["stage_seconds"])
        ['data', 'forward', 'backward', 'measure', 'step']
    """

    watches_microbatches = True

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._device = torch.device("cpu")
        self._waited = 0.0  # for the batches that were read before the window began
        self._marks: list[tuple[str, float | torch.Event]] = []

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Start the clock."""
        self._device = device_of(subject)
        self._waited = time.perf_counter() - started
        self._marks = []
        self._mark("")

    def on_batch(self, index: int) -> None:
        """The batch is here."""
        self._mark("data")

    def before_backward(self, index: int) -> None:
        """The forward is done."""
        self._mark("forward")

    def after_backward(self, index: int) -> None:
        """The backward is done."""
        self._mark("backward")

    def on_gradients(self, gradients: Gradients) -> None:
        """The sums are done, and the norm of a gradient that is not finite is known."""
        self._mark("measure")

    def before_step(self, gradients: Gradients) -> None:
        """The clip rule has decided."""
        self._mark("measure")

    def after_step(self, gradients: Gradients) -> None:
        """The optimizer has stepped."""
        self._mark("step")

    def read(self) -> Iterable[Reading]:
        """Give the times between the marks."""
        marks, waited = self._marks, self._waited

        def fields(seconds: Sequence[float]) -> dict[str, dict[str, float]]:
            stages = {stage: 0.0 for stage, _ in marks[1:]}
            for (stage, _), took in zip(marks[1:], seconds, strict=True):
                stages[stage] += took
            return {"stage_seconds": {**stages, "data": waited + stages.get("data", 0.0)}}

        if self._device.type == "cpu":
            yield Reading(_between([mark for _, mark in marks]), fields)
        else:
            yield Reading(lambda: _between([mark for _, mark in marks]), fields)

    def end(self) -> None:
        """Forget the marks."""
        self._marks = []

    def _mark(self, stage: str) -> None:
        if self._device.type == "cpu":
            self._marks.append((stage, time.perf_counter()))
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append((stage, event))


def device_of(subject: Subject) -> torch.device:
    """Where the first parameter lies."""
    return subject.parameters[0].device if subject.parameters else torch.device("cpu")


def _between(marks: Sequence[float | torch.Event]) -> list[float]:
    found = []
    for before, after in itertools.pairwise(marks):
        if isinstance(before, float) and isinstance(after, float):
            found.append(after - before)
        elif isinstance(before, torch.Event) and isinstance(after, torch.Event):
            after.synchronize()
            found.append(before.elapsed_time(after) / 1000.0)
    return found


def _peak_resident() -> int:
    if sys.platform == "linux":
        # `getrusage` would give a child the peak of the process that started it.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""The console: a run as it happens, live on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ..recipes.held_out import HeldOut
from ..records import UpdateRecord

__all__ = ["LiveWatcher", "PlainWatcher", "watching"]

_NUM_LINES = 20  # of a run that is not on a terminal
_RATE_WINDOW = 20  # updates over which targets a second are averaged


class PlainWatcher:
    """One line every so many updates, and one for each held-out loss.

    Args:
        steps: Applied updates of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self._every = max(1, steps // _NUM_LINES)

    def on_update(self, record: UpdateRecord) -> None:
        """Print the record when it is due, or was skipped."""
        if not record.applied or record.step == 1 or record.step % self._every == 0:
            print(record, flush=True)  # noqa: T201 - this is the command's output

    def on_held_out(self, held_out: HeldOut) -> None:
        """Print it."""
        print(_held_out_words(held_out), flush=True)  # noqa: T201 - this is the command's output


class LiveWatcher:
    """A bar with loss, norm, rate, targets a second and time left.

    Args:
        progress: The display.
        steps: Applied updates of the whole run.
        done: Applied updates before this process began.
    """

    def __init__(self, progress: Progress, *, steps: int, done: int) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task(
            "train", total=steps, completed=done, loss="-", norm="-", lr="-", rate="-"
        )
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)

    def on_update(self, record: UpdateRecord) -> None:
        """Move the bar; a skipped update gets a line of its own."""
        self._recent.append((time.perf_counter(), next(iter(record.denominators.values()), 0)))
        if not record.applied:
            self._progress.console.print(str(record), highlight=False)
        self._progress.update(
            self._task,
            completed=record.step,
            loss="-" if record.loss_mean is None else f"{record.loss_mean:.4f}",
            norm=f"{record.grad_norm:.3g}" if record.grad_norm is not None else "-",
            lr=f"{record.lr[0]:.2e}",
            rate=self._rate(),
        )

    def on_held_out(self, held_out: HeldOut) -> None:
        """Print it above the bar."""
        self._progress.console.print(_held_out_words(held_out), highlight=False)

    def _rate(self) -> str:
        seconds = self._recent[-1][0] - self._recent[0][0]
        if not seconds:
            return "-"
        return f"{sum(n for _, n in list(self._recent)[1:]) / seconds:,.0f}"


@contextlib.contextmanager
def watching(*, steps: int, done: int) -> Iterator[PlainWatcher | LiveWatcher]:
    """Show a run while it goes on.

    Args:
        steps: Applied updates of the whole run.
        done: Applied updates before this process began.
    """
    console = Console()
    if not console.is_terminal:
        yield PlainWatcher(steps)
        return
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("norm {task.fields[norm]}"),
        TextColumn("lr {task.fields[lr]}"),
        TextColumn("{task.fields[rate]} targets/s"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, refresh_per_second=5) as progress:
        yield LiveWatcher(progress, steps=steps, done=done)


def _held_out_words(held_out: HeldOut) -> str:
    return f"held-out loss {held_out.loss_mean:.4f} after {held_out.step:,} updates"

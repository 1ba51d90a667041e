"""Watching a run: a live display on a terminal, plain lines elsewhere.

Both show the same facts: loss, gradient norm, rate, targets a second, time left, held-out loss.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from ..records import UpdateRecord
from .sparkline import Sparkline
from .stopping import Stop

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..recipes.held_out import HeldOut

__all__ = ["Live", "Plain", "Silent", "Watch", "watch_of"]

_NUM_RECENT = 20  # updates behind the targets a second
_NUM_LINES = 20  # plain lines of a whole run, beside those that say something special


class Watch(Protocol):
    """What the training command needs of a display."""

    def on_update(self, record: UpdateRecord) -> None:
        """Show the record of an update."""
        ...

    def on_held_out(self, held_out: HeldOut) -> None:
        """Show a held-out loss."""
        ...

    def say(self, line: str) -> None:
        """Show a line that stays."""
        ...

    def showing(self) -> contextlib.AbstractContextManager[None]:
        """Show the run while the context is open."""
        ...


class Pace:
    """How fast a run goes, and how long it will take.

    Args:
        steps: Applied updates of the whole run.
        step: Those applied before now.
    """

    def __init__(self, steps: int, step: int) -> None:
        self.steps = steps
        self.step = step
        self._first_step = step
        self._started = self._last = time.perf_counter()
        self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=_NUM_RECENT)

    def add(self, record: UpdateRecord) -> None:
        """Count an update."""
        self.step = record.step
        self._last = time.perf_counter()
        self._recent.append((next(iter(record.denominators.values()), 0), record.seconds))

    def targets_per_second(self) -> float:
        """Targets of the first loss term a second, over the last updates."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(targets for targets, _ in self._recent) / seconds if seconds else 0.0

    def seconds_left(self) -> float | None:
        """Seconds until the last update, held-out losses and checkpoints included."""
        done = self.step - self._first_step
        if done == 0:
            return None
        left = (self._last - self._started) / done * (self.steps - self.step)
        return max(0.0, left - (time.perf_counter() - self._last))


class Plain:
    """One line now and then, for a file or a pipe; each skipped update and held-out loss has one.

    Args:
        steps: Applied updates of the whole run.
        step: Those applied before now.
    """

    def __init__(self, steps: int, step: int) -> None:
        self._every = max(1, steps // _NUM_LINES)
        self._pace = Pace(steps, step)

    def on_update(self, record: UpdateRecord) -> None:
        """Show every twentieth of the run, and every update that was skipped."""
        self._pace.add(record)
        is_due = record.step in (1, self._pace.steps) or record.step % self._every == 0
        if record.applied and not is_due:
            return
        left = self._pace.seconds_left()
        ends = [f"{self._pace.targets_per_second():,.0f} targets/s"]
        if left is not None:
            ends.append(f"{clock(left)} left")
        self.say(" | ".join([str(record), *ends]))

    def on_held_out(self, held_out: HeldOut) -> None:
        """Show it."""
        self.say(held_out_line(held_out))

    def say(self, line: str) -> None:
        """Write a line at once, so that a pipe sees it when it happens."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def showing(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to open."""
        return contextlib.nullcontext()


class Live:
    """Two lines that change in place, below lines that stay; gone when the run ends.

    Args:
        name: Of the run.
        steps: Applied updates of the whole run.
        step: Those applied before now.
        stop: Shown when somebody asks for it.
        console: Where to draw.
    """

    def __init__(self, name: str, steps: int, step: int, stop: Stop, console: Console) -> None:
        self._name = name
        self._pace = Pace(steps, step)
        self._stop = stop
        self._console = console
        self._last: UpdateRecord | None = None
        self._losses = Sparkline()

    def on_update(self, record: UpdateRecord) -> None:
        """Take it into the display; one that was skipped leaves a line."""
        self._pace.add(record)
        self._losses.add(record.loss_mean)
        self._last = record
        if not record.applied:
            self.say(str(record))

    def on_held_out(self, held_out: HeldOut) -> None:
        """Leave a line."""
        self.say(held_out_line(held_out))

    def say(self, line: str) -> None:
        """Leave a line above the display."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Draw four times a second, in a thread, so that a long update can be seen to run."""
        import rich.live

        with rich.live.Live(get_renderable=self.__rich__, console=self._console, transient=True):
            yield

    def __rich__(self) -> RenderableType:
        """Lay the two lines out."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        pace = self._pace
        left = pace.seconds_left()
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, 1, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        bar.add_row(
            Text(self._name, style="bold"),
            ProgressBar(
                total=pace.steps,
                completed=pace.step,
                complete_style="cyan",
                finished_style="green",
            ),
            f"{pace.step:,}/{pace.steps:,}",
            "" if left is None else f"{clock(left)} left",
        )
        return Group(bar, self._facts())

    def _facts(self) -> RenderableType:
        from rich.text import Text

        if self._stop():
            return Text("Stopping after this update; once more stops at once.", style="yellow")
        last = self._last
        if last is None:
            return Text("first update ...", style="dim")
        facts = Text(no_wrap=True, overflow="ellipsis")
        facts.append("loss ", style="dim").append(number(last.loss_mean))
        facts.append("   norm ", style="dim").append(number(last.grad_norm))
        facts.append(" clipped" if last.clipped else "", style="yellow")
        facts.append("   rate ", style="dim").append(f"{last.lr[0]:.2e}")
        facts.append(f"   {self._pace.targets_per_second():,.0f}")
        facts.append(" targets/s", style="dim")
        # Last, so that it is what a narrow window cuts.
        return facts.append(f"   {self._losses.text()}", style="cyan")


class Silent:
    """Shows nothing: the display of a rank for which another speaks."""

    def on_update(self, record: UpdateRecord) -> None:
        """Show nothing."""

    def on_held_out(self, held_out: HeldOut) -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Say nothing."""

    def showing(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to open."""
        return contextlib.nullcontext()


def watch_of(name: str, steps: int, step: int, stop: Stop, *, speaks: bool = True) -> Watch:
    """Choose the display that fits stdout, and have `stop` speak where the display does not.

    Args:
        name: Of the run.
        steps: Applied updates of the whole run.
        step: Those applied before now.
        stop: Whether somebody asked the run to stop.
        speaks: Whether this rank shows anything.
    """
    if not speaks:
        return Silent()
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            return Live(name, steps, step, stop, console)
    stop.notice = "Stopping after this update; once more stops at once."
    return Plain(steps, step)


def held_out_line(held_out: HeldOut) -> str:
    """Put a held-out loss in a line."""
    return f"held-out loss {held_out.loss_mean:.4f} after {held_out.step:,} updates"


def clock(seconds: float) -> str:
    """Give a time as minutes and seconds, with hours where there are any.

    Example:
        >>> clock(59.6), clock(3661)
        ('1:00', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None) -> str:
    """Give a number in four digits, also where they are zeros; a dash for none.

    Example:
        >>> number(1.4), number(None)
        ('1.400', '-')
    """
    return "-" if value is None else f"{value:#.4g}"

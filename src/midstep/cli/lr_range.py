"""`midstep lr-range`: between which rates to search, from a short run that leaves no trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from . import declarations as given
from .failures import FINE, FOUND, attempt
from .options import DEFAULT_SEED, Options
from .waiting import sleep_while_waiting

if TYPE_CHECKING:
    from ..range_test import RangeTest

__all__ = ["lr_range"]

_SWEEP = "The sweep"


Start: TypeAlias = Annotated[
    float, typer.Option(metavar="RATE", help="First rate.", rich_help_panel=_SWEEP)
]
End: TypeAlias = Annotated[
    float, typer.Option(metavar="RATE", help="Last rate.", rich_help_panel=_SWEEP)
]
Updates: TypeAlias = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Updates of a sweep, one a rate; more give lower bounds. 80 suit trainings of some "
        "400 updates.",
        rich_help_panel=_SWEEP,
    ),
]
Repeats: TypeAlias = Annotated[
    int,
    typer.Option(
        metavar="N", help="Sweeps, each with other data; medians count.", rich_help_panel=_SWEEP
    ),
]
Linear: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--linear", help="Rise by equal steps, not equal factors.", rich_help_panel=_SWEEP
    ),
]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the curve with its bounds, as .png, .svg or .html.",
        rich_help_panel=_SWEEP,
    ),
]
Json: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print one line of JSON, curves included.", rich_help_panel=_SWEEP),
]


def lr_range(  # noqa: PLR0917 - an option of the command is an argument here
    recipe: given.NamedRecipe,
    start: Start = 1e-6,
    end: End = 10.0,
    updates: Updates = 80,
    repeats: Repeats = 1,
    linear: Linear = False,
    size: given.Size = None,
    rows: given.Rows = None,
    targets: given.Targets = None,
    precision: given.Precision = None,
    clip: given.Clip = None,
    seed: given.Seed = None,
    picture: Picture = None,
    json: Json = False,
    traceback: given.Traceback = False,
) -> int:
    """Find between which learning rates to search, by a short run that keeps nothing.

    Exit code 1 says that the loss fell at no rate, so that there are no bounds.
    """

    def action() -> int:
        from ..pictures import check_picture_path

        if picture is not None:
            check_picture_path(picture)
        options = Options(
            size=size, rows=rows, targets=targets, precision=precision, clip=clip, seed=seed
        )
        sleep_while_waiting()
        found, base = _run(recipe, options, (start, end, updates, repeats), linear=linear)
        if picture is not None:
            from ..pictures import save_picture
            from ..range_test.picture import picture as draw

            title = f"Learning-rate range test of {Path(recipe).name}"
            save_picture(draw(found, title=title), picture, title=title)
        if json:
            typer.echo(found.to_json())
        else:
            for line in _lines(found, base, end):
                typer.echo(line)
            if picture is not None:
                typer.echo(f"drawn to {picture}")
        return FINE if found.reading.lower is not None else FOUND

    return attempt(action, traceback=traceback)


def _run(
    name: str, options: Options, sweep: tuple[float, float, int, int], *, linear: bool
) -> tuple[RangeTest, float]:
    from ..recipes.loading import find_recipe, load_recipe

    source = find_recipe(name)  # before torch is imported

    from ..range_test import lr_range as run_sweep
    from ..recipes.settings import make_updater

    recipe = load_recipe(source, seed=DEFAULT_SEED if options.seed is None else options.seed)
    settings = options.settings(recipe)
    updater = make_updater(recipe, settings)
    start, end, num_updates, repeats = sweep
    with _progress(num_updates * repeats) as on_point:
        found = run_sweep(
            updater,
            recipe.train,
            recipe.loss,
            size=settings.size,
            rows=settings.rows,
            targets=settings.targets,
            count=recipe.count,
            start_lr=start,
            end_lr=end,
            num_updates=num_updates,
            linear=linear,
            repeats=repeats,
            on_point=on_point,
        )
    return found, settings.lr


def _lines(found: RangeTest, base: float, end: float) -> Iterator[str]:
    """Say what was done, what it shows, and what each bound is for."""
    from ..range_test import Confidence

    last = max(curve.lr[-1] for curve in found.curves if curve.lr)
    num = sum(len(curve.lr) for curve in found.curves)
    skipped = f", {found.num_skipped} skipped" if found.num_skipped else ""
    stopped = "" if last >= end * (1 - 1e-9) else ", where the loss was lost"
    yield f"{num:,} update{'s' * (num != 1)}{skipped}, up to a rate of {last:.2g}{stopped}"
    yield ""
    reading = found.reading
    if reading.lower is None or reading.upper is None:
        yield str(found)
        return
    uses = (
        "floor of a cycle, start of a warm-up",
        "a constant rate lies between here",
        "and here; peak of a cosine or one-cycle schedule",
        "above it the run is lost; stay below half of it",
    )
    rows = str(reading).splitlines()
    for row, use in zip(rows[:4], uses, strict=True):
        yield f"{row:54}{use}"
    yield from rows[4:]
    if reading.confidence is Confidence.LOW:
        yield "These may be chance: sweep again with more points (`--updates`) or `--repeats`."
    if found.is_warm:
        yield "from weights that were trained already: it speaks of these"
    yield ""
    yield "A range to search in, not an optimum: one short run from one start."
    place = "below" if base < reading.lower.lr else "above" if base > reading.upper.lr else "within"
    yield f"The recipe's own rate, {base:.1e}, is {place} lower .. upper."


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, float, float], None] | None]:
    """Show rate and loss while the sweep runs, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("first update ...", total=total)
        yield lambda index, lr, loss: bar.update(
            task, completed=index + 1, description=f"rate {lr:.2e}   loss {loss:.4f}"
        )

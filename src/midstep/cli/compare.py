"""`midstep compare`: thresholds, rates, schedules side by side, on held-out loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from . import declarations as given
from .failures import FINE, attempt
from .options import Options

if TYPE_CHECKING:
    from ..comparing import Ending
    from ..comparing.grid import Cell, Grid

__all__ = ["compare"]

_GRID = "The grid"

Vary: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--vary",
        metavar="NAME=VALUE,...",
        help="What is varied: clip, lr, schedule, warmup, minimum, precision, size, rows or "
        "targets. Several make a grid.",
        rich_help_panel=_GRID,
        show_default=False,
    ),
]
Seeds: TypeAlias = Annotated[
    int,
    typer.Option(metavar="N", help="Seeds of each variant, from --seed on.", rich_help_panel=_GRID),
]
Jobs: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Runs at a time. Default: one a core or CUDA device.",
        rich_help_panel=_GRID,
    ),
]
Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the runs are written; what is there already is not run again. Default: "
        "runs/compare-RECIPE.",
        rich_help_panel=_GRID,
    ),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON.", rich_help_panel=_GRID)
]


def compare(  # noqa: PLR0917 - an option of the command is an argument here
    recipe: given.NamedRecipe,
    vary: Vary,
    seeds: Seeds = 3,
    jobs: Jobs = None,
    out: Folder = None,
    json: Json = False,
    size: given.Size = None,
    rows: given.Rows = None,
    targets: given.Targets = None,
    precision: given.Precision = None,
    clip: given.Clip = None,
    skip_nonfinite: given.SkipNonfinite = None,
    lr: given.LearningRate = None,
    schedule: given.ScheduleShape = None,
    warmup: given.Warmup = None,
    minimum: given.Minimum = None,
    steps: given.Steps = None,
    seed: given.Seed = None,
    traceback: given.Traceback = False,
) -> int:
    """Train a recipe under every combination, and say which differences are more than chance.

    The same seeds give the same first weights and data to every variant. A run that blows up is
    stopped and counted as lost. Stopped with Ctrl-C, the same command goes on where it was.
    """

    def action() -> int:
        options = Options(
            size=size,
            rows=rows,
            targets=targets,
            precision=precision,
            clip=clip,
            skip_nonfinite=skip_nonfinite,
            lr=lr,
            schedule=schedule,
            steps=steps,
            seed=seed,
        )
        folder = out if out is not None else Path("runs") / f"compare-{Path(recipe).stem}"
        # They fit only beside a schedule, which may be what is varied.
        beside = {"warmup": warmup, "minimum": minimum}
        common = {name: value for name, value in beside.items() if value is not None}
        grid = _grid(recipe, vary, options, common, num_seeds=seeds, path=folder)
        return _compare(grid, jobs, json=json)

    return attempt(action, traceback=traceback)


def _grid(
    recipe: str,
    vary: list[str],
    options: Options,
    common: Mapping[str, Any],
    *,
    num_seeds: int,
    path: Path,
) -> Grid:
    from ..comparing.grid import Grid, parse_axis

    axes = dict(parse_axis(text) for text in vary)
    if len(axes) < len(vary):
        raise ValueError("`--vary` names an option twice; list all its values in one")
    return Grid(
        recipe=recipe, axes=axes, base=options, num_seeds=num_seeds, path=path, common=common
    )


def _compare(grid: Grid, jobs: int | None, *, json: bool) -> int:
    if jobs is not None and jobs < 1:
        raise ValueError(f"`--jobs {jobs}`: at least 1")

    from ..comparing import run_grid
    from ..comparing.page import picture, table
    from ..pictures import save_picture

    cells: list[Cell] = []

    def note(num: int, total: int, cell: Cell, ending: Ending) -> None:
        cells.append(cell)
        sys.stderr.write(f"{num}/{total}  {cell.variant.name}, seed {cell.seed}: {ending}\n")

    found = run_grid(grid, jobs=jobs, on_end=note)
    (grid.path / "comparison.json").write_text(found.to_json() + "\n", encoding="utf-8")
    seeds = "1 seed" if grid.num_seeds == 1 else f"{grid.num_seeds} seeds"
    title = f"{grid.recipe}: {' and '.join(grid.axes)} compared over {seeds}"
    page = grid.path / "comparison.html"
    save_picture(picture(found, cells, title=title), page, title=title, below=table(found))
    if json:
        typer.echo(found.to_json())
        return FINE
    for line in found.lines():
        typer.echo(line)
    typer.echo(f"drawn to {page}")
    return FINE

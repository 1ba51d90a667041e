"""Side by side: the same data and seeds under other thresholds, rates or schedules.

`compare` runs a grid of whole trainings, each in a process of its own, and says which differences
are larger than the spread over the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.options import Options
from .cell import Ending
from .grid import Cell, Grid, Variant, parse_axis
from .outcome import Comparison, Row, rows_of
from .pool import num_places, run_cells

if TYPE_CHECKING:
    from ..recipes.settings import Settings

__all__ = [
    "Comparison",
    "Ending",
    "Grid",
    "Row",
    "Variant",
    "cells_of",
    "compare",
    "parse_axis",
    "run_grid",
]


def compare(
    recipe: str | Path,
    vary: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    steps: int | None = None,
    num_seeds: int = 3,
    jobs: int | None = None,
) -> Comparison:
    """Train every combination of values with every seed, and compare held-out losses.

    All variants see the same data in the same order from the same first weights, seed by seed, and
    about as many targets. A run that blows up is stopped and counted as lost, so that trying
    without clipping costs no more than it must. Cells run side by side, one process a core or
    accelerator; a grid that is stopped goes on with the cells that have not ended, from their last
    checkpoints.

    Args:
        recipe: A built-in name or the path of a `.py` file, with held-out batches.
        vary: Option of `midstep train` to its values: `clip` (`math.inf` only measures), `lr`,
            `schedule`, `warmup`, `minimum`, `precision`, `size`, `rows`, `targets`.
        out: Folder of the comparison; each cell is a run in it, as `midstep train` writes them.
        steps: Applied updates of a run; the recipe's by default. Where `size` or `targets` is
            varied it is that of the recipe's own (or of the first value, where it has none), and
            the others take as many as see as much.
        num_seeds: Seeds of each variant. With one, no difference can be told from chance.
        jobs: Processes at a time; one a core or CUDA device by default.

    Returns:
        One row a variant, the best first.

    Raises:
        ValueError: An option cannot be varied or does not fit, or the folder holds runs of other
            settings.
        MidstepError: A cell could not be run; the others are kept.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = compare(  # doctest: +SKIP
        ...         "digits", {"clip": [0.5, 1.0]}, out=folder, steps=40, num_seeds=2)
    """
    grid = Grid(
        recipe=str(recipe),
        axes=vary,
        base=Options(steps=steps),
        num_seeds=num_seeds,
        path=Path(out),
    )
    return run_grid(grid, jobs=jobs)


def run_grid(
    grid: Grid,
    *,
    jobs: int | None = None,
    on_end: Callable[[int, int, Cell, Ending], None] | None = None,
) -> Comparison:
    """Run a grid and read its outcome.

    Args:
        grid: What is varied.
        jobs: As in `compare`.
        on_end: Called as each cell ends, with how many have, and of how many.
    """
    cells = cells_of(grid)
    places, num_devices = num_places()
    num_ended = 0

    def note(cell: Cell, ending: Ending) -> None:
        nonlocal num_ended
        num_ended += 1
        if on_end is not None:
            on_end(num_ended, len(cells), cell, ending)

    grid.path.mkdir(parents=True, exist_ok=True)
    run_cells(
        grid.recipe,
        cells,
        jobs=min(jobs or places, len(cells)),
        num_devices=num_devices,
        on_end=note,
    )
    return rows_of(cells)


def cells_of(grid: Grid) -> list[Cell]:
    """Make the cells of a grid, and find out now what would fail in each of them later.

    Args:
        grid: What is varied.

    Raises:
        ValueError: Options do not fit, or the folder holds runs of other settings.
    """
    from ..recipes.loading import find_recipe, load_recipe
    from ..recipes.settings import make_updater

    source = find_recipe(grid.recipe)
    recipe = load_recipe(source, seed=grid.base.seed or 0)
    if recipe.held_out is None:
        raise ValueError(
            f"`{grid.recipe}` has no held-out batches, so there is nothing to compare by. Give it "
            "some as `Recipe(held_out=...)`"
        )
    total = grid.base.steps or recipe.steps
    usual: Mapping[str, int | None] = {
        "size": recipe.size,
        "targets": recipe.targets or grid.axes.get("targets", [None])[0],
    }

    def steps(variant: Variant) -> int:
        # As many batches or targets, in updates of another size.
        for name, own in variant.values:
            if (one := usual.get(name)) is not None and own > 0:
                return max(1, round(total * one / int(own)))
        return total

    cells = grid.cells(steps=steps)
    for index, cell in enumerate(cells):
        settings = cell.options.settings(recipe)
        if index < len(grid.variants()):
            make_updater(recipe, settings)
        _refuse_another(cell, source, settings)
    return cells


def _refuse_another(cell: Cell, source: str | Path, settings: Settings) -> None:
    """Refuse a folder whose runs are those of another comparison: they would be taken for these."""
    from ..cli.identity import refuse_another_recipe, refuse_another_run
    from ..recipes.folder import read_about

    if not (cell.path / "run.json").exists():
        return
    about = read_about(cell.path)
    try:
        refuse_another_recipe(cell.path, about, source)
        refuse_another_run(cell.path, about, settings)
    except ValueError as error:
        raise ValueError(f"{error} Another folder is named by `--out`.") from None
